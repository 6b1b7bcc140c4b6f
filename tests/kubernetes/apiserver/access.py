"""Who may call what: bearer tokens, and RBAC from the objects that were applied.

Model: a token stands for a user; a rule lets a call through if verb, group, resource and name match, by a RoleBinding
of the namespace or a ClusterRoleBinding. What is refused is remembered, so that a run can fail on it. Upstream:
`plugin/pkg/auth/authorizer/rbac/rbac.go`, `pkg/apis/rbac/v1/evaluation_helpers.go`; default discovery roles:
`bootstrappolicy/policy.go`.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.apiserver.calls import Call, User
from tests.kubernetes.apiserver.errors import ApiError, forbidden
from tests.kubernetes.apiserver.store import Store

Object = dict[str, Any]
MASTERS = "system:masters"
POD_NAME = "authentication.kubernetes.io/pod-name"
_RBAC = "rbac.authorization.k8s.io"
# What `system:discovery`, `system:public-info-viewer` and `system:basic-user` let every authenticated user do.
_OPEN_REVIEWS = ("selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews")


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is asked for."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        what = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {what}{f' {self.name}' if self.name else ''}{where}"


@dataclass(frozen=True, slots=True)
class Denial:
    """A call that no Role allowed."""

    user: str
    asked: Attributes

    def __str__(self) -> str:
        return f"{self.user} may not {self.asked}"


@dataclass(frozen=True, slots=True)
class _Token:
    user: User
    expires_at: float | None
    # The objects it is bound to: the service account's uid, and the pod's where it is for one.
    bound_to: tuple[tuple[tuple[str, str], str, str, str], ...] = ()


def service_account_user(namespace: str, name: str, uid: str = "", pod: str = "") -> User:
    """`pod`: the one that its token is bound to (`pkg/serviceaccount/util.go`, UserInfo)."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
    return User(f"system:serviceaccount:{namespace}:{name}", groups, uid, {POD_NAME: [pod]} if pod else {})


class Access:
    """Authentication and authorisation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tokens: dict[str, _Token] = {}
        self.denied: list[Denial] = []

    def issue(
        self,
        user: User,
        lasting_s: float | None = None,
        bound_to: tuple[tuple[tuple[str, str], str, str, str], ...] = (),
    ) -> str:
        token = "test-" + secrets.token_urlsafe(24)
        expires_at = None if lasting_s is None else time.time() + lasting_s
        self._tokens[token] = _Token(user, expires_at, bound_to)
        return token

    def user_of(self, authorization: str) -> User:
        scheme, _, token = authorization.partition(" ")
        found = self._tokens.get(token.strip()) if scheme.lower() == "bearer" else None
        if found is None or (found.expires_at is not None and found.expires_at < time.time()) or not self._bound(found):
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return found.user

    def user_of_token(self, token: str) -> User | None:
        try:
            return self.user_of(f"Bearer {token}")
        except ApiError:
            return None

    def _bound(self, token: _Token) -> bool:
        """A token ends with its service account and its pod (`pkg/serviceaccount/claims.go`, Validate)."""
        for key, namespace, name, uid in token.bound_to:
            value = self._store.get(key, namespace, name)
            if value is None or value["metadata"]["uid"] != uid:
                return False
        return True

    def require(self, call: Call) -> None:
        plural = call.target.plural + (f"/{call.subresource}" if call.subresource else "")
        asked = Attributes(call.verb, call.resource.group, plural, call.namespace, call.name)
        if plural == "namespaces" and call.name:
            asked = Attributes(call.verb, "", plural, call.name, call.name)
        if self.allows(call.user, asked):
            return
        self.denied.append(Denial(call.user.name, asked))
        raise forbidden(self.refusal(call.user, asked), plural, call.resource.group, call.name)

    def refusal(self, user: User, asked: Attributes) -> str:
        """Words of `endpoints/handlers/responsewriters/errors.go`, forbiddenMessage."""
        what = f"{asked.resource}.{asked.group}" if asked.group else asked.resource
        name = f' "{asked.name}"' if asked.name else ""
        where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
        return (
            f'{what}{name} is forbidden: User "{user.name}" cannot {asked.verb} resource "{asked.resource}" '
            f'in API group "{asked.group}"{where}'
        )

    def allows(self, user: User, asked: Attributes) -> bool:
        if MASTERS in user.groups:
            return True
        if asked.verb == "create" and asked.resource in _OPEN_REVIEWS:
            return True
        return any(_rule_allows(rule, asked) for rule in self.rules(user, asked.namespace))

    def rules(self, user: User, namespace: str) -> list[Object]:
        found: list[Object] = []
        for binding in self._store.list((_RBAC, "clusterrolebindings")):
            if _names(binding, user, ""):
                found += self._role_rules(binding["roleRef"], "")
        if namespace:
            for binding in self._store.list((_RBAC, "rolebindings"), namespace):
                if _names(binding, user, namespace):
                    found += self._role_rules(binding["roleRef"], namespace)
        return found

    def _role_rules(self, ref: Object, namespace: str) -> list[Object]:
        if ref["kind"] == "ClusterRole":
            role = self._store.get((_RBAC, "clusterroles"), "", ref["name"])
        else:
            role = self._store.get((_RBAC, "roles"), namespace, ref["name"])
        return (role or {}).get("rules") or []


def _names(binding: Object, user: User, namespace: str) -> bool:
    for each in binding.get("subjects") or []:
        match each["kind"]:
            case "ServiceAccount":
                where = each.get("namespace") or namespace
                if user.name == f"system:serviceaccount:{where}:{each['name']}":
                    return True
            case "User":
                if user.name == each["name"]:
                    return True
            case "Group":
                if each["name"] in user.groups:
                    return True
    return False


def _rule_allows(rule: Object, asked: Attributes) -> bool:
    def has(values: list[str], wanted: str) -> bool:
        return "*" in values or wanted in values

    if not has(rule.get("verbs") or [], asked.verb) or not has(rule.get("apiGroups") or [], asked.group):
        return False
    resources = rule.get("resources") or []
    _, _, sub = asked.resource.partition("/")
    if not has(resources, asked.resource) and not (sub and f"*/{sub}" in resources):
        return False
    names = rule.get("resourceNames") or []
    # A create has no name yet, so that a rule with names never allows it.
    return not names or (bool(asked.name) and asked.name in names)
