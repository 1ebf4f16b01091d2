"""Who a caller is and what they may do: bearer tokens, RBAC, the access reviews."""

import secrets
from typing import NamedTuple

from tests.cluster.double.store import Object, Store, failure, stamp

_GROUP = "rbac.authorization.k8s.io"
_PUBLIC = ["/healthz", "/livez", "/readyz", "/version", "/version/"]
_DISCOVERY = ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz"]
_EVERYONE, _ANONYMOUS = "system:authenticated", "system:unauthenticated"


def _resource_rule(verbs: list[str], group: str, resources: list[str]) -> Object:
    return {"verbs": verbs, "apiGroups": [group], "resources": resources}


# name -> (rules, groups that are bound to it): the part of the bootstrap policy that matters here.
_BOOTSTRAP: dict[str, tuple[list[Object], list[str]]] = {
    "cluster-admin": (
        [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}, {"verbs": ["*"], "nonResourceURLs": ["*"]}],
        ["system:masters"],
    ),
    "system:basic-user": (
        [
            _resource_rule(["create"], "authorization.k8s.io", ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]),
            _resource_rule(["create"], "authentication.k8s.io", ["selfsubjectreviews"]),
        ],
        [_EVERYONE],
    ),
    "system:service-account-issuer-discovery": (
        [{"verbs": ["get"], "nonResourceURLs": ["/.well-known", "/.well-known/*"]}],
        [_EVERYONE],
    ),
    "system:discovery": (
        [{"verbs": ["get"], "nonResourceURLs": [*_DISCOVERY, "/version", "/version/"]}],
        [_EVERYONE],
    ),
    "system:public-info-viewer": ([{"verbs": ["get"], "nonResourceURLs": _PUBLIC}], [_EVERYONE, _ANONYMOUS]),
}


class User(NamedTuple):
    """A caller."""

    name: str
    uid: str
    groups: tuple[str, ...]


class Action(NamedTuple):
    """What a caller wants to do: to a resource, or to a path when `resource` is empty."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""


ANONYMOUS = User("system:anonymous", "", (_ANONYMOUS,))
ADMIN = User("admin", "", ("system:masters", _EVERYONE))


class Access:
    """Tokens and rights.

    Attributes:
        store: The store that holds roles and bindings.
        tokens: Bearer token -> its user.
    """

    def __init__(self, store: Store) -> None:
        """Install the bootstrap policy."""
        self.store = store
        self.tokens: dict[str, User] = {}
        for name, (rules, groups) in _BOOTSTRAP.items():
            labels = {"kubernetes.io/bootstrapping": "rbac-defaults"}
            meta = {"name": name, "labels": labels}
            subjects = [{"kind": "Group", "apiGroup": _GROUP, "name": group} for group in groups]
            reference = {"apiGroup": _GROUP, "kind": "ClusterRole", "name": name}
            store.create("clusterroles", {"metadata": meta, "rules": rules})
            store.create("clusterrolebindings", {"metadata": meta, "subjects": subjects, "roleRef": reference})

    def add_user(self, name: str) -> str:
        """A token for a person without rights (`admin` has all)."""
        token = secrets.token_urlsafe(24)
        # The empty group is what a static token file without groups gives.
        self.tokens[token] = ADMIN if name == "admin" else User(name, name, ("", _EVERYONE))
        return token

    def issue(self, namespace: str, account: str) -> str:
        """A token for a ServiceAccount."""
        token = secrets.token_urlsafe(24)
        found = self.store.get("serviceaccounts", namespace, account)
        uid = found["metadata"]["uid"] if found else ""
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", _EVERYONE)
        self.tokens[token] = User(f"system:serviceaccount:{namespace}:{account}", uid, groups)
        return token

    def authenticate(self, header: str | None) -> User:
        """The caller of a request.

        Raises:
            ApiError: 401 for a token that nobody has.
        """
        if not header:
            return ANONYMOUS
        scheme, _, token = header.strip().partition(" ")
        user = self.tokens.get(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise failure(401, "Unauthorized", "Unauthorized")
        return user

    def authorize(self, user: User, action: Action) -> None:
        """Refuse what a caller may not do.

        Raises:
            ApiError: 403 in the words of the API server.
        """
        if self.allowed(user, action)[0]:
            return
        if not action.resource:
            message = f'forbidden: User "{user.name}" cannot {action.verb} path "{action.path}"'
            raise failure(403, "Forbidden", message, {})
        qualified = f"{action.resource}.{action.group}" if action.group else action.resource
        details: Object = {"name": action.name, "group": action.group, "kind": action.resource}
        details = {key: value for key, value in details.items() if value}
        named = f'{qualified} "{action.name}"' if action.name else qualified
        part = f"{action.resource}/{action.subresource}" if action.subresource else action.resource
        where = f'in the namespace "{action.namespace}"' if action.namespace else "at the cluster scope"
        what = f'cannot {action.verb} resource "{part}" in API group "{action.group}" {where}'
        raise failure(403, "Forbidden", f'{named} is forbidden: User "{user.name}" {what}', details)

    def allowed(self, user: User, action: Action) -> tuple[bool, str]:
        """Whether a caller may do something, and the reason that a review gives for it."""
        if "system:masters" in user.groups:
            return True, ""
        for rule, reason in self._rules(user, action.namespace):
            if _covers(rule, action):
                return True, reason
        return False, ""

    def rules(self, user: User, namespace: str) -> list[Object]:
        """Every rule that holds for a caller in a namespace."""
        return [rule for rule, _ in self._rules(user, namespace)]

    def _rules(self, user: User, namespace: str) -> list[tuple[Object, str]]:
        found = []
        bindings = self.store.peek("clusterrolebindings")
        if namespace:
            bindings = bindings + self.store.peek("rolebindings", namespace)
        for binding in bindings:
            subject = next((s for s in binding.get("subjects", ()) if _is(s, user)), None)
            if subject is None:
                continue
            reference, meta = binding["roleRef"], binding["metadata"]
            plural, scope = ("clusterroles", "") if reference["kind"] == "ClusterRole" else ("roles", namespace)
            role = self.store.get(plural, scope, reference["name"])
            where = f"{meta['name']}/{meta['namespace']}" if "namespace" in meta else meta["name"]
            who = subject["name"]
            if subject["kind"] == "ServiceAccount":
                who = f"{who}/{subject.get('namespace', namespace)}"
            reason = f'RBAC: allowed by {binding["kind"]} "{where}" of {reference["kind"]} "{reference["name"]}"'
            reason = f'{reason} to {subject["kind"]} "{who}"'
            found += [(rule, reason) for rule in (role or {}).get("rules", ())]
        return found


def _is(subject: Object, user: User) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in user.groups
    if subject["kind"] == "User":
        return subject["name"] == user.name
    return user.name == f"system:serviceaccount:{subject.get('namespace', '')}:{subject['name']}"


def _covers(rule: Object, action: Action) -> bool:
    def among(key: str, *values: str) -> bool:
        return "*" in rule.get(key, ()) or any(value in rule.get(key, ()) for value in values)

    if not among("verbs", action.verb):
        return False
    if not action.resource:
        urls = rule.get("nonResourceURLs", ())
        return any(u == action.path or (u.endswith("*") and action.path.startswith(u[:-1])) for u in urls)
    part = f"{action.resource}/{action.subresource}" if action.subresource else action.resource
    named = not rule.get("resourceNames") or action.name in rule["resourceNames"]
    return named and among("apiGroups", action.group) and among("resources", part, f"*/{action.subresource}")


def review(access: Access, user: User, kind: str, body: Object) -> Object:
    """The answer to a SelfSubjectReview, SelfSubjectAccessReview, SubjectAccessReview or SelfSubjectRulesReview.

    Args:
        access: Tokens and rights.
        user: Who asks.
        kind: Kind of the review.
        body: The review, decoded.
    """
    spec = body.get("spec", {})
    answered: Object = {"kind": kind, "apiVersion": body["apiVersion"], "metadata": {}, "spec": spec}
    if kind == "SelfSubjectReview":
        info = {"username": user.name, "uid": user.uid, "groups": list(user.groups)}
        info = {key: value for key, value in info.items() if value}
        meta = {"creationTimestamp": stamp(access.store.clock.now())}
        answered.pop("spec")
        return {**answered, "metadata": meta, "status": {"userInfo": info}}
    if kind == "SelfSubjectRulesReview":
        return {**answered, "spec": {}, "status": _rules_status(access.rules(user, spec.get("namespace", "")))}
    asked = spec.get("resourceAttributes", {})
    if kind == "SubjectAccessReview":
        user = User(spec.get("user", ""), spec.get("uid", ""), tuple(spec.get("groups", ())))
    keys = ("verb", "group", "resource", "subresource", "namespace", "name")
    action = Action(**{key: asked.get(key, "") for key in keys})
    if "nonResourceAttributes" in spec:
        wanted = spec["nonResourceAttributes"]
        action = Action(wanted.get("verb", ""), path=wanted.get("path", ""))
    allowed, reason = access.allowed(user, action)
    return {**answered, "status": {"allowed": allowed, **({"reason": reason} if reason else {})}}


def _rules_status(rules: list[Object]) -> Object:
    return {
        "resourceRules": [rule for rule in rules if "resources" in rule],
        "nonResourceRules": sorted((r for r in rules if "nonResourceURLs" in r), key=lambda r: r["nonResourceURLs"]),
        "incomplete": False,
    }
