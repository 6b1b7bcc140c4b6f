"""Starts one container: `python -I -S launcher.py` with its description as JSON on standard input.

Model: this process makes namespaces, a root of its own (the host's, read-only, with volumes mounted into it) and the
container's process, which is number 1 in its PID namespace: when that ends, the kernel ends everything it started. The
launcher then exits as the container did. `enter` runs a further command inside a container that runs (exec, preStop).

Upstream of the root: mount(2), pivot_root(2), mount_setattr(2), pid_namespaces(7), user_namespaces(7). It imports
nothing of the project: it runs before the container has an environment.
"""

import ctypes
import json
import os
import signal
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x10000000, 0x20000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 32, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG = 1


def checked(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source, target, kind="", flags=0, data=""):
    encoded = [each.encode() if each else None for each in (source, target, kind)]
    checked(_LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None), f"mount {source} on {target}")


def read_only(target):
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    attributes = Attributes(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (AT_FDCWD, target.encode(), AT_RECURSIVE, ctypes.byref(attributes), size)
    checked(_LIBC.syscall(SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def unshare(hostname):
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | (CLONE_NEWUSER if user else 0)
    checked(_LIBC.unshare(flags), "unshare")
    if user:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    checked(_LIBC.sethostname(hostname.encode(), len(hostname)), "sethostname")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def below(path, parents):
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in parents)


class Root:
    """A file system in a folder: the host's, with room for mount points that the host has not."""

    def __init__(self, folder):
        self.folder = folder
        # Folders that are our own: what is in them is mounted one by one, so that more can be put beside it.
        self.own = set()
        mount("tmpfs", folder, "tmpfs", 0, "mode=755,size=16m")
        self.open("/")

    def at(self, path):
        return self.folder + path.rstrip("/") if path != "/" else self.folder

    def open(self, path):
        """Makes a folder our own, with everything that the host has there."""
        self.own.add(path)
        for entry in os.scandir(path) if os.path.isdir(path) else ():
            target = self.at(os.path.join(path, entry.name))
            if path == "/" and entry.name in ("proc", os.path.basename(self.folder)):
                os.makedirs(target, exist_ok=True)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_dir():
                os.mkdir(target)
                mount(entry.path, target, flags=MS_BIND | MS_REC)
            else:
                # Devices, sockets and pipes, too.
                with open(target, "w"):
                    pass
                mount(entry.path, target, flags=MS_BIND)

    def place(self, path, is_file):
        """Makes sure that a mount point is there; its real path."""
        path = os.path.normpath(path)
        parts = path.strip("/").split("/")
        where = "/"
        for at, part in enumerate(parts):
            following = os.path.join(where, part)
            if os.path.islink(following):
                following = os.path.realpath(following)
                return self.place(os.path.join(following, *parts[at + 1 :]), is_file)
            if at == len(parts) - 1:
                break
            if where in self.own and following not in self.own:
                self._reopen(following)
            where = following
        target = self.at(path)
        if not os.path.lexists(target):
            if is_file:
                with open(target, "w"):
                    pass
            else:
                os.mkdir(target)
        return path

    def _reopen(self, path):
        target = self.at(path)
        if os.path.ismount(target):
            checked(_LIBC.umount2(target.encode(), MNT_DETACH), f"umount {target}")
        os.makedirs(target, exist_ok=True)
        self.open(path)


def build(spec):
    root = Root(spec["root"])
    mounts = sorted(spec["mounts"], key=lambda each: each["target"].count("/") if each["target"] != "/" else 0)
    outer = []
    for each in mounts:
        # What is mounted inside another volume finds its place there, once that is mounted.
        if not below(each["target"], outer):
            each["target"] = root.place(each["target"], os.path.isfile(each["source"] or "/"))
            outer.append(each["target"])
    read_only(root.folder)
    for each in mounts:
        target = root.at(each["target"])
        if not os.path.lexists(target):
            os.makedirs(target)
        if each["source"]:
            mount(each["source"], target, flags=MS_BIND | MS_REC)
        else:
            mount("tmpfs", target, "tmpfs", 0, each.get("options", "mode=1777"))
        if each.get("read_only"):
            read_only(target)
    for path in spec["kept"]:
        # Under a volume that hides it: the checkout and its interpreter stay where they are.
        if below(path, [each["target"] for each in mounts]):
            os.makedirs(root.at(path), exist_ok=True)
            mount(path, root.at(path), flags=MS_BIND | MS_REC)
            read_only(root.at(path))
    return root.folder


def enter_root(folder):
    os.chdir(folder)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    checked(_LIBC.syscall(number, b".", b"."), "pivot_root")
    checked(_LIBC.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def execute(spec):
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(spec["cwd"])
    os.execvpe(spec["command"][0], spec["command"], spec["env"])


def fail(report, error):
    os.write(report, json.dumps({"error": str(error)}).encode())
    os._exit(126)


def run(spec, report, become=None):
    """Reports the container's process on file `report`, then waits for it: what it exited with. `become`: what the
    process does instead of executing its command."""
    isolated = spec["isolated"]
    parent = os.getpid()
    if isolated:
        try:
            unshare(spec["env"].get("HOSTNAME", "localhost")[:63])
        except OSError as error:
            fail(report, error)
    ends, begins = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ends)
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if isolated:
                folder = build(spec)
                mount("proc", folder + "/proc", "proc")
                enter_root(folder)
            elif os.getppid() != parent:
                os._exit(126)
            os.setsid()
            os.set_inheritable(begins, False)
            if become is not None:
                become(spec)
            execute(spec)
        except BaseException as error:
            os.write(begins, str(error).encode())
            os._exit(127)
    os.close(begins)
    with os.fdopen(ends, "rb") as pipe:
        said = pipe.read()
    os.write(report, json.dumps({"error": said.decode()} if said else {"pid": child}).encode())
    os.close(report)
    # Of a fork in a PID namespace the number is ours: the kubelet signals the container by it.
    _, status = os.waitpid(child, 0)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def enter(spec):
    """Runs a command where the process `pid` is."""
    kinds = (["user"] if os.geteuid() else []) + ["uts", "mnt", "pid"]
    files = [os.open(f"/proc/{spec['pid']}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for file in files:
        checked(_LIBC.setns(file, 0), "setns")
    child = os.fork()
    if child == 0:
        try:
            execute(spec)
        except BaseException as error:
            os.write(2, str(error).encode())
            os._exit(127)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    described = json.loads(sys.stdin.buffer.read())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if described.get("pid"):
        enter(described)
    # The report travels on a descriptor of its own; the container must not hold it open.
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(described["report"], False)
    os._exit(run(described, described["report"]))
