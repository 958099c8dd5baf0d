"""Every public name says what it is; what takes a tensor says its shape; what raises says when."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_trainer

PACKAGE = Path(grpo_trainer.__path__[0])
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# (B, T) · (N,) · (P·G, R) · (..., V) · (2B, T - 1) · () for a scalar: symbols and commas, no prose.
AXIS = r"(?:\.\.\.|\d*[A-Z]\w{0,2}(?:\s?[·*+−-]\s?\w{1,3})*|\d+)"
SHAPE = re.compile(rf"\(\)|\({AXIS},\)|\({AXIS}(?:, {AXIS})+\)")


def definitions(path: Path) -> Iterator[tuple[Definition, str]]:
    """Public functions and classes of a module and public methods of its public classes, with the docs around them."""
    if any(part.startswith("_") and part != "__init__.py" for part in path.parts[len(PACKAGE.parts) :]):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        parent, around = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield node, around
                if isinstance(node, ast.ClassDef):
                    stack.append((node, ast.get_docstring(node) or ""))


def without_docstring(node: Definition, around: str) -> bool:
    """Whether a definition has no docstring; an overload and a property's setter share the first one's."""
    decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    return not ast.get_docstring(node) and not decorators & {"overload", "setter", "override"}


def without_raises(node: Definition, around: str) -> bool:
    """Whether a function raises in its own body, and its docstring has no Raises section."""
    return raises(node) and "Raises:" not in (ast.get_docstring(node) or "")


def raises(node: ast.AST) -> bool:
    """Whether a function names an exception that it raises; re-raising and 'not implemented' do not count."""
    if isinstance(node, ast.ClassDef):
        return False
    stack: list[ast.AST] = list(getattr(node, "body", []))
    while stack:
        inner = stack.pop()
        if isinstance(inner, ast.Raise) and inner.exc and "NotImplementedError" not in ast.unparse(inner.exc):
            return True
        if not isinstance(inner, Definition | ast.Lambda):
            stack.extend(ast.iter_child_nodes(inner))
    return False


def without_shape(node: Definition, around: str) -> bool:
    """Whether a function has an argument that is a tensor, and neither it nor its class names a shape."""
    if isinstance(node, ast.ClassDef):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    kinds = [ast.unparse(a.annotation).strip("'\"") for a in arguments if a.annotation]
    takes_tensor = any(re.fullmatch(r"(torch\.)?Tensor( \| None)?", kind) for kind in kinds)
    return takes_tensor and not SHAPE.search((ast.get_docstring(node) or "") + around)


RULES = [without_docstring, without_raises, without_shape]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    modules = sorted(PACKAGE.rglob("*.py"))
    found = [(path, node, around) for path in modules for node, around in definitions(path)]
    assert len(found) > 10, f"found next to nothing public in {PACKAGE}"
    faults = [f"{p.relative_to(PACKAGE)}:{n.lineno} {n.name}" for p, n, around in found if rule(n, around)]
    assert faults == []


def test_every_module_says_what_it_is():
    silent = [
        str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("rule", "source", "breach"),
    [
        (without_docstring, "def f(): pass", True),
        (without_docstring, "class C: 'what it is'", False),
        (without_docstring, "@overload\ndef f(): ...", False),
        (without_raises, "def f():\n    '''Short.'''\n    if x:\n        raise ValueError('no')", True),
        (
            without_raises,
            "def f():\n    '''Long.\n\n    Raises:\n        ValueError: if.\n    '''\n    raise ValueError",
            False,
        ),
        (without_raises, "def f():\n    def g():\n        raise ValueError", False),
        (without_raises, "def f():\n    raise NotImplementedError('later')", False),
        (without_raises, "def f():\n    try: x\n    except E: raise", False),
        (without_shape, "def f(x: Tensor): 'Doubles x (the logits).'", True),
        (without_shape, "def f(x: torch.Tensor | None): 'Doubles x, see (Schulman, 2020).'", True),
        (without_shape, "def f(x: Tensor): 'Doubles x (B, T).'", False),
        (without_shape, "def f(x: Tensor): 'Doubles x (N,).'", False),
        (without_shape, "def f(x: Tensor): 'Doubles x (P·G, T - 1) and the last (..., V).'", False),
        (without_shape, "def f(x: int): 'Doubles x.'", False),
        (without_shape, "def f(x: list[Tensor]): 'Ragged rows.'", False),
    ],
)
def test_a_breach_is_found(rule, source, breach):
    assert rule(ast.parse(source).body[0], "") is breach
