"""A small reader of Python sources: it evaluates what it can from the syntax tree, and runs and imports nothing.

Enough of the language for tables, dataclass fields, and functions that only compare and collect. Whatever it does not
understand is UNKNOWN, which is false in a condition and has every attribute.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 40
_NATIVE = (dict, list, str, tuple, set, frozenset)
_BUILTINS = ("len", "list", "tuple", "set", "frozenset", "dict", "sorted", "int", "str", "float", "bool", "any", "all",
             "range", "zip", "enumerate", "min", "max", "sum", "reversed")  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
    ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.BitOr: lambda a, b: a | b, ast.FloorDiv: lambda a, b: a // b, ast.Pow: lambda a, b: a**b,
    ast.Div: lambda a, b: a / b, ast.LShift: lambda a, b: a << b,
}  # fmt: skip


class _Unknown:
    """What could not be understood."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Class:
    """A class statement."""

    module: str
    node: ast.ClassDef = field(compare=False)
    name: str


@dataclass(frozen=True)
class Function:
    """A function, and what it is bound to."""

    module: str
    node: ast.FunctionDef | ast.Lambda = field(compare=False)
    name: str
    owner: Class | None = None
    bound: Any = None


@dataclass(frozen=True)
class Outside:
    """A name of a library that is not read: ``json.loads`` is Outside("loads")."""

    name: str


@dataclass(frozen=True)
class Literal:
    """``typing.Literal[...]``, nested ones flattened."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Member:
    """A member of an enum."""

    owner: Class
    name: str
    value: Any = field(compare=False)


@dataclass(frozen=True)
class _Module:
    name: str


@dataclass(frozen=True)
class _Super:
    owner: Class
    bound: Any


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Raised(Exception):
    """The code that was read raises here."""


class _Loop(Exception):
    def __init__(self, stops: bool) -> None:
        self.stops = stops


Scope = dict[str, Any]


class Reader:
    """Modules by dotted name, read from their texts; ``special`` answers calls of functions by their name."""

    def __init__(
        self, texts: Mapping[str, str], special: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self._texts = texts
        self._trees: dict[str, dict[str, ast.AST]] = {}
        self._values: dict[tuple[str, str], Any] = {}
        self._depth = 0
        self.special = dict(special or {})

    # Modules and names

    def has(self, module: str) -> bool:
        return module in self._texts

    def names(self, module: str) -> dict[str, ast.AST]:
        """Every top-level name of a module, with the statement that defines it at run time."""
        if module not in self._trees:
            found: dict[str, ast.AST] = {}
            if module in self._texts:
                self._collect(ast.parse(self._texts[module]).body, found)
            self._trees[module] = found
        return self._trees[module]

    def _collect(self, body: list[ast.stmt], found: dict[str, ast.AST]) -> None:
        for node in body:
            match node:
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    self._collect(node.orelse, found)
                case ast.If() | ast.Try():
                    self._collect(node.body, found)
                    later: dict[str, ast.AST] = {}
                    self._collect(node.orelse, later)
                    for handler in getattr(node, "handlers", ()):
                        self._collect(handler.body, later)
                    for name, other in later.items():
                        found.setdefault(name, other)
                case ast.Assign():
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            found[target.id] = node.value
                case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                    found[name] = value
                case ast.ClassDef() | ast.FunctionDef():
                    if not any(getattr(d, "id", "") == "overload" for d in node.decorator_list):
                        found[node.name] = node
                case ast.ImportFrom() | ast.Import():
                    for alias in node.names:
                        found[alias.asname or alias.name.partition(".")[0]] = node

    def lookup(self, module: str, name: str) -> Any:
        """The value of a top-level name."""
        key = (module, name)
        if key not in self._values:
            self._values[key] = UNKNOWN  # while it is looked up, for circles
            self._values[key] = self._lookup(module, name)
        return self._values[key]

    def _lookup(self, module: str, name: str) -> Any:
        node = self.names(module).get(name)
        match node:
            case None:
                if self.has(f"{module}.{name}"):
                    return _Module(f"{module}.{name}")
                return UNKNOWN
            case ast.ClassDef():
                return Class(module, node, name)
            case ast.FunctionDef():
                return Function(module, node, name)
            case ast.ImportFrom() | ast.Import():
                return self._imported(module, node, name)
            case _:
                return self.value(node, module)

    def _imported(self, module: str, node: ast.ImportFrom | ast.Import, name: str) -> Any:
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        if isinstance(node, ast.Import):
            if alias.asname:
                return _Module(alias.name)
            return _Module(alias.name.partition(".")[0])
        home = self.home(module, node)
        if self.has(home):
            return self.lookup(home, alias.name)
        return Outside(alias.name)

    def home(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = module in getattr(self._texts, "packages", ())
        keep = len(parts) - node.level + is_package
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    # Classes

    def family(self, cls: Class) -> list[Class]:
        """The class and its bases, nearest first, as far as they are read."""
        out = [cls]
        for base in cls.node.bases:
            found = self.value(base, cls.module)
            if isinstance(found, Class):
                out += [c for c in self.family(found) if c not in out]
        return out

    def is_enum(self, cls: Class) -> bool:
        return any("Enum" in ast.unparse(base) for c in self.family(cls) for base in c.node.bases)

    def members(self, cls: Class) -> list[str]:
        """Names of an enum's members."""
        return [t.id for node in cls.node.body if isinstance(node, ast.Assign) for t in node.targets
                if isinstance(t, ast.Name) and not t.id.startswith("_")]  # fmt: skip

    def is_dataclass(self, cls: Class) -> bool:
        def decorated(one: Class) -> bool:
            return any("dataclass" in (text := ast.unparse(d)) or text.partition("(")[0] == "config"
                       for d in one.node.decorator_list)  # fmt: skip

        return any(decorated(one) for one in self.family(cls))

    def fields(self, cls: Class) -> dict[str, tuple[Class, ast.AnnAssign]]:
        """Fields of a dataclass in order, with the class that declares each."""
        out: dict[str, tuple[Class, ast.AnnAssign]] = {}
        for one in reversed(self.family(cls)):
            for node in one.node.body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                if not ast.unparse(node.annotation).startswith(
                    ("ClassVar", "typing.ClassVar", "InitVar")
                ):
                    out[node.target.id] = (one, node)
        return out

    def default(self, cls: Class, name: str) -> Any:
        """The default of a dataclass's field."""
        one, node = self.fields(cls)[name]
        return self._default(node.value, one.module)

    def _default(self, node: ast.expr | None, module: str) -> Any:
        if node is None:
            return UNKNOWN
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "field",
            "Field",
        ):
            given = {k.arg: k.value for k in node.keywords}
            if "default" in given:
                return self.value(given["default"], module)
            if "default_factory" in given:
                return self.call(self.value(given["default_factory"], module), [], {})
            if node.args:
                return self.value(node.args[0], module)
            return UNKNOWN
        return self.value(node, module)

    def attribute(self, of: Any, name: str) -> Any:
        """``of.name``."""
        match of:
            case _Unknown():
                return UNKNOWN
            case Outside():
                return Outside(name)
            case _Module(name=module):
                if module in self._texts:
                    return self.lookup(module, name)
                if self.has(f"{module}.{name}"):
                    return _Module(f"{module}.{name}")
                return Outside(name)
            case Class():
                return self._of_class(of, name, self.family(of), None)
            case _Super(owner=owner, bound=bound):
                whole = self.family(bound) if isinstance(bound, Class) else [owner]
                return self._of_class(owner, name, whole[whole.index(owner) + 1 :], bound)
            case Member(name=its_name, value=value):
                return {"name": its_name, "value": value}.get(name, UNKNOWN)
            case Function() | Literal():
                return of.name if name == "__name__" and isinstance(of, Function) else UNKNOWN
            case _:
                try:
                    return getattr(of, name)
                except AttributeError:
                    return UNKNOWN

    def _of_class(self, cls: Class, name: str, family: list[Class], bound: Any) -> Any:
        if name == "__name__":
            return cls.name
        for one in family:
            for node in one.node.body:
                match node:
                    case ast.AnnAssign(target=ast.Name(id=found)) if (
                        found == name and node.value is not None
                    ):
                        return self._default(node.value, one.module)
                    case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                        value = self.value(node.value, one.module)
                        return Member(one, name, value) if self.is_enum(one) else value
                    case ast.FunctionDef(name=found) if found == name:
                        decorators = [ast.unparse(d) for d in node.decorator_list]
                        owner = bound or cls
                        return Function(
                            one.module,
                            node,
                            name,
                            one,
                            owner if "classmethod" in decorators else bound,
                        )
        return UNKNOWN

    # Expressions

    def value(
        self, node: ast.AST, module: str, scope: Scope | None = None, owner: Class | None = None
    ) -> Any:
        """The value of an expression; UNKNOWN where it is not understood."""
        if self._depth > MAX_DEPTH:
            return UNKNOWN
        self._depth += 1
        try:
            return self._value(node, module, scope if scope is not None else {}, owner)
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            return UNKNOWN
        finally:
            self._depth -= 1

    def _value(self, node: ast.AST, module: str, scope: Scope, owner: Class | None) -> Any:
        def sub(one: ast.AST) -> Any:
            return self.value(one, module, scope, owner)

        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name, module, scope)
            case ast.Attribute(value=of, attr=name):
                return self.attribute(sub(of), name)
            case ast.Subscript(value=of):
                return self._item(node, sub(of), module, scope, owner)
            case ast.List(elts=elts):
                return self._elements(elts, sub)
            case ast.Tuple(elts=elts):
                return tuple(self._elements(elts, sub))
            case ast.Set(elts=elts):
                return set(self._elements(elts, sub))
            case ast.Dict():
                out: dict[Any, Any] = {}
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        found = sub(value)
                        out |= found if isinstance(found, dict) else {}
                    else:
                        out[sub(key)] = sub(value)
                return out
            case ast.BoolOp(op=op, values=values):
                result: Any = None
                for one in values:
                    result = sub(one)
                    if bool(result) == isinstance(op, ast.Or):
                        return result
                return result
            case ast.UnaryOp(op=ast.Not(), operand=one):
                found = sub(one)
                return UNKNOWN if found is UNKNOWN else not found
            case ast.UnaryOp(op=ast.USub(), operand=one):
                return -sub(one)
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](sub(left), sub(right))
            case ast.Compare():
                left = sub(node.left)
                for op, right_node in zip(node.ops, node.comparators, strict=True):
                    right = sub(right_node)
                    if UNKNOWN in (left, right) or not _COMPARE[type(op)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return sub(body) if sub(test) else sub(orelse)
            case ast.NamedExpr(target=target, value=one):
                scope[target.id] = sub(one)
                return scope[target.id]
            case ast.JoinedStr(values=values):
                parts = [sub(one) for one in values]
                return UNKNOWN if any(p is UNKNOWN for p in parts) else "".join(map(str, parts))
            case ast.FormattedValue(value=one):
                return sub(one)
            case ast.Lambda():
                return Function(module, node, "<lambda>", owner)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, module, scope, owner)
            case ast.Call():
                return self._call(node, module, scope, owner)
            case _:
                return UNKNOWN

    def _elements(self, elts: list[ast.expr], sub: Callable[[ast.AST], Any]) -> list[Any]:
        out: list[Any] = []
        for one in elts:
            if isinstance(one, ast.Starred):
                found = sub(one.value)
                out += list(found) if isinstance(found, (*_NATIVE, type({}.keys()))) else []
            else:
                out.append(sub(one))
        return out

    def _name(self, name: str, module: str, scope: Scope) -> Any:
        if name in scope:
            return scope[name]
        if name in self.names(module):
            return self.lookup(module, name)
        if hasattr(builtins, name):
            return Outside(name)
        return UNKNOWN

    def _item(
        self, node: ast.Subscript, of: Any, module: str, scope: Scope, owner: Class | None
    ) -> Any:
        if of == Outside("Literal"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            values: list[Any] = []
            for part in parts:
                found = self.value(part, module, scope, owner)
                values += found.values if isinstance(found, Literal) else [found]
            return Literal(tuple(values))
        if isinstance(of, Class) and self.is_enum(of):
            return self.attribute(of, self.value(node.slice, module, scope, owner))
        if isinstance(of, _NATIVE):
            return of[self.value(node.slice, module, scope, owner)]  # type: ignore[index]
        return UNKNOWN

    def _comprehension(self, node: Any, module: str, scope: Scope, owner: Class | None) -> Any:
        out: list[Any] = []

        def walk(generators: list[ast.comprehension], inner: Scope) -> None:
            if not generators:
                if isinstance(node, ast.DictComp):
                    out.append(
                        (
                            self.value(node.key, module, inner, owner),
                            self.value(node.value, module, inner, owner),
                        )
                    )
                else:
                    out.append(self.value(node.elt, module, inner, owner))
                return
            first, *rest = generators
            for item in self._iterable(self.value(first.iter, module, inner, owner)):
                here = dict(inner)
                self._assign(first.target, item, module, here, owner)
                if all(self.value(test, module, here, owner) for test in first.ifs):
                    walk(rest, here)

        walk(node.generators, dict(scope))
        if isinstance(node, ast.DictComp):
            return dict(out)
        return set(out) if isinstance(node, ast.SetComp) else out

    def _iterable(self, value: Any) -> list[Any]:
        if isinstance(value, Class) and self.is_enum(value):
            return [self.attribute(value, name) for name in self.members(value)]
        if value is UNKNOWN or not hasattr(value, "__iter__"):
            return []
        return list(value)

    # Calls

    def _call(self, node: ast.Call, module: str, scope: Scope, owner: Class | None) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and owner is not None:
            return _Super(owner, scope.get("cls", scope.get("self")))
        args = self._elements(node.args, lambda one: self.value(one, module, scope, owner))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            given = self.value(keyword.value, module, scope, owner)
            if keyword.arg is None:
                kwargs |= given if isinstance(given, dict) else {}
            else:
                kwargs[keyword.arg] = given
        return self.call(self.value(node.func, module, scope, owner), args, kwargs)

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        name = getattr(function, "name", None)
        if isinstance(function, Function | Outside | Class) and name in self.special:
            return self.special[name](*args, **kwargs)
        match function:
            case Function():
                return self.run(function, args, kwargs)
            case Outside():
                return self._builtin(function.name, args, kwargs)
            case Class() if (
                any(ast.unparse(b).startswith("dict") for b in function.node.bases) and not args
            ):
                return {}
            case Class() | _Unknown() | _Module() | Literal() | Member():
                return UNKNOWN
            case _:
                if callable(function):
                    return function(*args, **kwargs)
                return UNKNOWN

    def _builtin(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name == "get_args" and args:
            return args[0].values if isinstance(args[0], Literal) else UNKNOWN
        if name in ("deepcopy", "copy", "cast"):
            return args[-1]
        if name == "getattr" and len(args) > 1:
            found = self.attribute(args[0], args[1])
            return args[2] if found is UNKNOWN and len(args) > 2 else found
        if name == "hasattr":
            return self.attribute(args[0], args[1]) is not UNKNOWN
        if name in _BUILTINS and not any(a is UNKNOWN for a in args):
            if args and isinstance(args[0], Class):
                args = [self._iterable(args[0])]
            return getattr(builtins, name)(*args, **kwargs)
        return UNKNOWN

    def run(self, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Follow a function's body."""
        if self._depth > MAX_DEPTH:
            return UNKNOWN
        node = function.node
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        scope: Scope = {}
        for arg, default in zip(reversed(names), reversed(node.args.defaults), strict=False):
            scope[arg] = self.value(default, function.module)
        for arg, default_node in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default_node is not None:
                scope[arg.arg] = self.value(default_node, function.module)
        if function.bound is not None:
            args = [function.bound, *args]
        scope |= dict(zip(names, args, strict=False)) | kwargs
        if isinstance(node, ast.Lambda):
            return self.value(node.body, function.module, scope, function.owner)
        self._depth += 1
        try:
            self.follow(node.body, function.module, scope, function.owner)
        except _Return as done:
            return done.value
        finally:
            self._depth -= 1
        return None

    # Statements

    def follow(self, body: list[ast.stmt], module: str, scope: Scope, owner: Class | None) -> None:
        """Follow statements; names go to ``scope``."""
        for node in body:
            self._follow(node, module, scope, owner)

    def _follow(self, node: ast.stmt, module: str, scope: Scope, owner: Class | None) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value, module, scope, owner)
                for target in targets:
                    self._assign(target, found, module, scope, owner)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self.value(value, module, scope, owner), module, scope, owner)
            case ast.AugAssign(target=target, op=op, value=value):
                both = ast.BinOp(left=target, op=op, right=value)
                self._assign(target, self.value(both, module, scope, owner), module, scope, owner)
            case ast.Expr(value=value):
                self.value(value, module, scope, owner)
            case ast.If(test=test, body=body, orelse=orelse):
                self.follow(
                    body if self.value(test, module, scope, owner) else orelse, module, scope, owner
                )
            case ast.For():
                self._for(node, module, scope, owner)
            case ast.With(body=body) | ast.Try(body=body):
                self.follow(body, module, scope, owner)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        of = self.value(target.value, module, scope, owner)
                        if isinstance(of, dict):
                            of.pop(self.value(target.slice, module, scope, owner), None)
            case ast.Return(value=value):
                raise _Return(None if value is None else self.value(value, module, scope, owner))
            case ast.Raise():
                raise Raised
            case ast.Continue() | ast.Break():
                raise _Loop(isinstance(node, ast.Break))
            case ast.FunctionDef():
                scope[node.name] = Function(module, node, node.name, owner)
            case ast.ImportFrom() | ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    scope[name] = self._imported(module, node, name)

    def _for(self, node: ast.For, module: str, scope: Scope, owner: Class | None) -> None:
        for item in self._iterable(self.value(node.iter, module, scope, owner)):
            self._assign(node.target, item, module, scope, owner)
            try:
                self.follow(node.body, module, scope, owner)
            except _Loop as loop:
                if loop.stops:
                    return

    def _assign(
        self, target: ast.expr, value: Any, module: str, scope: Scope, owner: Class | None
    ) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Attribute(value=of, attr=name):
                found = self.value(of, module, scope, owner)
                if not isinstance(found, _Unknown | Outside | Class | Function | Member):
                    setattr(found, name, value)
            case ast.Subscript(value=of, slice=index):
                found = self.value(of, module, scope, owner)
                if isinstance(found, dict | list):
                    found[self.value(index, module, scope, owner)] = value
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                items = list(value) if hasattr(value, "__iter__") else [UNKNOWN] * len(elts)
                for one, item in zip(elts, items, strict=False):
                    self._assign(one, item, module, scope, owner)
