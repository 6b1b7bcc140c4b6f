#!/usr/bin/env bash
# Runs the steps of the CPU image where there is no container engine: Debian in a folder (debootstrap) stands for the
# base, chroot for RUN. Then the image's own command is run in it as the image's user, on a root that it cannot write,
# and the script of `helm test` against that. Needs root, debootstrap, Debian's mirror and a package index.
#   helm/image/try.sh [FOLDER]        about 3 GiB there; STOKER_MIRROR=URL, STOKER_MOUNT=FOLDER (a folder of wheels)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=${1:-/var/tmp/stoker-image}
image=$root/helm/image
mkdir -p "$work"
[ -e "$work/base/etc/debian_version" ] || debootstrap --variant=minbase bookworm "$work/base" ${STOKER_MIRROR:+"$STOKER_MIRROR"}

arguments=()
[ -n "${STOKER_MOUNT:-}" ] && arguments+=(--mount "$STOKER_MOUNT")
python3 "$image/steps.py" "$image/Containerfile" "$root" "$work/base" "$work/image" "${arguments[@]}"

echo "== set-id files (Debian's own; without effect where privileges cannot be gained) and files of its own user (none)"
find -L "$work/image" -xdev \( -perm -4000 -o -perm -2000 \) -type f | head
find "$work/image/opt/stoker" -user 10001 | head -3

echo "== its own command, as its own user"
data=$work/data
rm -rf "$data" && mkdir -p "$data" "$work/image/data" "$work/image/tmp"
chown 10001:10001 "$data" && chmod 1777 "$work/image/tmp"
mount --bind "$data" "$work/image/data" && mount --bind /proc "$work/image/proc" && mount --bind /dev "$work/image/dev"
log=$work/up.log
env -i PATH=/opt/stoker/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp STOKER_ALLOWED_MODELS='file:///opt/stoker/*' \
  chroot --userspec=10001:10001 "$work/image" /opt/stoker/bin/stoker up --data-dir /data --host 127.0.0.1 --port 18080 >"$log" 2>&1 &
up=$!
finish() {
  kill "$up" 2>/dev/null || true
  wait "$up" 2>/dev/null || true
  env -i PATH=/opt/stoker/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp chroot --userspec=10001:10001 "$work/image" \
    /opt/stoker/bin/stoker down --data-dir /data --grace 0 >/dev/null 2>&1 || true
  umount "$work/image/data" "$work/image/proc" "$work/image/dev" || true
}
trap finish EXIT
for _ in $(seq 300); do [ -s "$data/admin.key" ] && break; sleep 0.2; done
env -i PATH=/opt/stoker/bin:/usr/sbin:/usr/bin:/sbin:/bin STOKER_URL=http://127.0.0.1:18080 STOKER_API_KEY="$(cat "$data/admin.key")" \
  STOKER_TEST_MODEL=file:///opt/stoker/test-model STOKER_TEST_STEP_S=120 \
  chroot --userspec=10001:10001 "$work/image" python -c "$(cat "$root/helm/stoker/files/cycle.py")"
echo "== well"
