"""What the package's own source must keep to."""

import ast
import pathlib

import foveate

SOURCES = sorted(pathlib.Path(foveate.__file__).parent.rglob("*.py"))


def begins_as_its_base(made: ast.FunctionDef) -> bool:
    return any(isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" for call in ast.walk(made))


def test_a_class_that_sets_fields_has_those_of_its_base_too():
    # A field that is added to the base is otherwise missing in objects of the class.
    classes = {
        c.name: c for path in SOURCES for c in ast.walk(ast.parse(path.read_text())) if isinstance(c, ast.ClassDef)
    }
    checked, without = 0, []
    for name, made in classes.items():
        own = any(ast.unparse(base).split(".")[-1] in classes for base in made.bases)
        for method in made.body if own else []:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                checked += 1
                without += [] if begins_as_its_base(method) else [name]
    assert checked >= 8 and not without
