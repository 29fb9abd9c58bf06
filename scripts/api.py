#!/usr/bin/env python3
"""The public API of the library's crates, a line for each item, in api/.

    scripts/api.py              compares with api/ and shows what differs
    scripts/api.py --update     writes api/

Read from rustdoc's JSON, by the pinned nightly of scripts/nightly.sh: another one may spell
the same API otherwise. An item is listed under its shortest public path in its crate; other paths
to it, and names of other crates that are handed on, are `use` lines. Types are shown by their last
name. What is hidden from the documentation is not listed, nor are crates whose interface is a
program's: the harness of the corpus and the trainer.
"""

import difflib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("foveate-conformance", "foveate-py", "foveate-train")
FORMAT = 57  # of rustdoc's JSON, as the pinned nightly writes it


class Api:
    """The lines of one crate."""

    def __init__(self, document):
        self.index, self.root = document["index"], document["root"]
        self.names = document["paths"]
        self.paths = defaultdict(set)  # id -> public paths
        self.handed_on = set()
        self.lines = set()
        self.walk(self.root, (), ())
        self.best = {i: min(p, key=lambda p: (len(p), p)) for i, p in self.paths.items()}
        for item, path in self.best.items():
            self.item(self.index[str(item)], path)
            for other in self.paths[item] - {path}:
                self.line(other, f"use {'::'.join(other)} = {'::'.join(path)}")
        for path, source in self.handed_on:
            self.line(path, f"use {'::'.join(path)} = {source}")
        self.impls()

    def line(self, path, text):
        self.lines.add((path, text.startswith("impl "), text))

    def text(self):
        return "".join(f"{text}\n" for _, _, text in sorted(self.lines))

    def walk(self, module, path, inside):
        """Notes the public paths of what a module has."""
        for i in self.index[str(module)]["inner"]["module"]["items"]:
            item = self.index.get(str(i))
            if item is None:
                continue
            kind, inner = next(iter(item["inner"].items()))
            if kind == "use":
                target = self.index.get(str(inner["id"]))
                if target is None:
                    star = "::*" if inner["is_glob"] else ""
                    name = (*path, "*") if inner["is_glob"] else (*path, inner["name"])
                    self.handed_on.add((name, inner["source"] + star))
                elif not inner["is_glob"]:
                    self.reach(target, (*path, inner["name"]), inside)
                elif "module" in target["inner"] and target["id"] not in inside:
                    self.walk(target["id"], path, (*inside, target["id"]))
            elif item["name"] and kind != "impl":
                self.reach(item, (*path, item["name"]), inside)

    def reach(self, item, path, inside):
        if item["id"] not in inside:
            self.paths[item["id"]].add(path)
            if "module" in item["inner"]:
                self.walk(item["id"], path, (*inside, item["id"]))

    def item(self, item, path):
        """The lines of an item and of its parts."""
        kind, inner = next(iter(item["inner"].items()))
        name = "::".join(path)
        head = "#[non_exhaustive] " if "non_exhaustive" in json.dumps(item["attrs"]) else ""
        if kind == "module":
            self.line(path, f"mod {name}")
        elif kind in ("struct", "union", "enum", "trait"):
            params, where = self.generics(inner["generics"])
            if kind == "trait":
                head += "unsafe " if inner["is_unsafe"] else ""
                params += self.bounds(": ", inner["bounds"])
                self.parts(path, name, inner["items"], "")
            self.line(path, f"{head}{kind} {name}{params}{where}{self.shape(inner)}")
            self.parts(path, name, self.fields(inner), "")
            for i in inner.get("variants", []):
                variant = self.index[str(i)]
                shape = variant["inner"]["variant"]["kind"]
                full = f"{name}::{variant['name']}"
                self.line((*path, variant["name"]), f"{full}{self.tuple_fields(shape)}")
                self.parts((*path, variant["name"]), full, self.fields({"kind": shape}), "")
            for i in inner.get("impls", []):
                block = self.index[str(i)]["inner"]["impl"]
                if block["trait"] is None:
                    self.parts(path, self.owner(block, name), block["items"], "")
        elif kind in ("macro", "proc_macro"):
            self.line(path, f"macro {name}!")
        else:
            self.part(path, item, name)

    def parts(self, path, name, ids, prefix):
        for i in ids:
            item = self.index.get(str(i))
            if item is not None:
                self.part((*path, item["name"]), item, f"{name}::{item['name']}")

    def part(self, path, item, name):
        """The line of a function, constant, type or field."""
        kind, inner = next(iter(item["inner"].items()))
        if kind == "function":
            text = self.function(name, inner)
        elif kind == "struct_field":
            text = f"{name}: {self.type(inner)}"
        elif kind in ("assoc_const", "constant", "static"):
            text = f"{'static' if kind == 'static' else 'const'} {name}: {self.type(inner['type'])}"
        elif kind in ("assoc_type", "type_alias"):
            params, where = self.generics(inner["generics"])
            is_type = f" = {self.type(inner['type'])}" if inner["type"] else ""
            text = f"type {name}{params}{self.bounds(': ', inner.get('bounds', []))}{is_type}{where}"
        else:
            raise SystemExit(f"{name}: scripts/api.py does not know items of the kind `{kind}`")
        self.line(path, text)

    def impls(self):
        """A line for each public type, and for each type of elsewhere, with the traits it has."""
        traits = defaultdict(set)
        for item in self.index.values():
            block = item["inner"].get("impl")
            if not block or not block["trait"] or block["is_synthetic"] or block["blanket_impl"]:
                continue
            trait = block["trait"]
            if trait["path"].endswith("StructuralPartialEq"):
                continue  # comes with a derived PartialEq
            local = self.names.get(str(trait["id"]), {}).get("crate_id") == 0
            if local and trait["id"] not in self.best:
                continue
            owner = block["for"].get("resolved_path")
            if owner and owner["id"] in self.best:
                path = self.best[owner["id"]]
                name = self.owner(block, "::".join(path))
            elif local and (not owner or self.names[str(owner["id"])]["crate_id"] != 0):
                name = self.type(block["for"])
                path = (*self.best[trait["id"]], name)
            else:
                continue
            negative = "!" if block["is_negative"] else ""
            traits[path, name].add(negative + self.path(trait))
        for (path, name), found in traits.items():
            self.line(path, f"impl {name}: {', '.join(sorted(found))}")

    def owner(self, block, name):
        """The type of an `impl`, with its arguments where they are not just parameters."""
        arguments = block["for"].get("resolved_path", {}).get("args")
        shown = self.arguments(arguments)
        params = {p["name"] for p in block["generics"]["params"]}
        plain = all(part in params for part in shown.strip("<>").split(", ") if part != "'_")
        return name if plain else name + shown

    def fields(self, inner):
        kind = inner.get("kind")
        if "fields" in inner:
            return inner["fields"]
        for shape in ("plain", "struct"):
            if isinstance(kind, dict) and shape in kind:
                return kind[shape]["fields"]
        return []

    def shape(self, inner):
        kind = inner.get("kind")
        if isinstance(kind, dict) and kind.get("plain", {}).get("has_stripped_fields"):
            return " { .. }"
        return self.tuple_fields(kind)

    def tuple_fields(self, kind):
        if not isinstance(kind, dict) or "tuple" not in kind:
            return ""
        fields = [self.index.get(str(i)) if i is not None else None for i in kind["tuple"]]
        shown = (self.type(f["inner"]["struct_field"]) if f else "_" for f in fields)
        return f"({', '.join(shown)})"

    def function(self, name, inner):
        header, sig = inner["header"], inner["sig"]
        words = [w for w in ("const", "async", "unsafe") if header[f"is_{w}"]]
        if header["abi"] != "Rust":
            words.append(f"extern {json.dumps(header['abi'])}")
        params, where = self.generics(inner["generics"])
        inputs = ", ".join(self.input(n, t) for n, t in sig["inputs"])
        output = f" -> {self.type(sig['output'])}" if sig["output"] else ""
        return f"{' '.join([*words, 'fn'])} {name}{params}({inputs}){output}{where}"

    def input(self, name, kind):
        if name == "self":
            shown = self.type(kind)
            if re.fullmatch(r"(&('\w+ )?(mut )?)?Self", shown):
                return shown.replace("Self", "self")
        return f"{name}: {self.type(kind)}"

    def generics(self, generics):
        shown = [self.parameter(p) for p in generics["params"] if not synthetic(p)]
        where = [self.predicate(p) for p in generics["where_predicates"]]
        return (
            f"<{', '.join(shown)}>" if shown else "",
            f" where {', '.join(where)}" if where else "",
        )

    def parameter(self, p):
        kind, inner = next(iter(p["kind"].items()))
        if kind == "lifetime":
            return p["name"] + (f": {' + '.join(inner['outlives'])}" if inner["outlives"] else "")
        if kind == "const":
            default = f" = {inner['default']}" if inner["default"] else ""
            return f"const {p['name']}: {self.type(inner['type'])}{default}"
        default = f" = {self.type(inner['default'])}" if inner["default"] else ""
        return p["name"] + self.bounds(": ", inner["bounds"]) + default

    def predicate(self, predicate):
        kind, inner = next(iter(predicate.items()))
        if kind == "bound_predicate":
            return self.type(inner["type"]) + self.bounds(": ", inner["bounds"])
        if kind == "lifetime_predicate":
            return f"{inner['lifetime']}: {' + '.join(inner['outlives'])}"
        return f"{self.type(inner['lhs'])} = {self.term(inner['rhs'])}"

    def bounds(self, before, bounds):
        return before + " + ".join(self.bound(b) for b in bounds) if bounds else ""

    def bound(self, bound):
        kind, inner = next(iter(bound.items()))
        if kind == "outlives":
            return inner
        if kind == "use":
            return f"use<{', '.join(next(iter(a.values())) for a in inner)}>"
        mark = {"none": "", "maybe": "?", "maybe_const": "~const "}[inner["modifier"]]
        return f"{self.binder(inner)}{mark}{self.path(inner['trait'])}"

    def binder(self, inner):
        names = [p["name"] for p in inner["generic_params"]]
        return f"for<{', '.join(names)}> " if names else ""

    def path(self, path):
        return path["path"].split("::")[-1] + self.arguments(path["args"])

    def arguments(self, arguments):
        if not arguments:
            return ""
        kind, inner = next(iter(arguments.items()))
        if kind == "parenthesized":
            output = f" -> {self.type(inner['output'])}" if inner["output"] else ""
            return f"({', '.join(self.type(t) for t in inner['inputs'])}){output}"
        shown = [self.argument(a) for a in inner["args"]]
        for constraint in inner["constraints"]:
            name = constraint["name"] + self.arguments(constraint["args"])
            how, what = next(iter(constraint["binding"].items()))
            bound = self.bounds(": ", what) if how == "constraint" else f" = {self.term(what)}"
            shown.append(name + bound)
        return f"<{', '.join(shown)}>" if shown else ""

    def argument(self, argument):
        if argument == "infer":
            return "_"
        kind, inner = next(iter(argument.items()))
        return {
            "lifetime": lambda: inner,
            "type": lambda: self.type(inner),
            "const": lambda: inner["expr"],
        }[kind]()

    def term(self, term):
        kind, inner = next(iter(term.items()))
        return self.type(inner) if kind == "type" else inner["expr"]

    def type(self, t):
        if t == "infer":
            return "_"
        kind, inner = next(iter(t.items()))
        return getattr(self, f"type_{kind}")(inner)

    def type_resolved_path(self, t):
        return self.path(t)

    def type_generic(self, t):
        return t

    def type_primitive(self, t):
        return "!" if t == "never" else t

    def type_tuple(self, t):
        return f"({', '.join(self.type(x) for x in t)}{',' if len(t) == 1 else ''})"

    def type_slice(self, t):
        return f"[{self.type(t)}]"

    def type_array(self, t):
        return f"[{self.type(t['type'])}; {t['len']}]"

    def type_impl_trait(self, t):
        return "impl" + self.bounds(" ", t)

    def type_dyn_trait(self, t):
        shown = [self.binder(p) + self.path(p["trait"]) for p in t["traits"]]
        return "dyn " + " + ".join(shown + ([t["lifetime"]] if t["lifetime"] else []))

    def type_borrowed_ref(self, t):
        lifetime = f"{t['lifetime']} " if t["lifetime"] else ""
        return f"&{lifetime}{'mut ' if t['is_mutable'] else ''}{self.type(t['type'])}"

    def type_raw_pointer(self, t):
        return f"*{'mut' if t['is_mutable'] else 'const'} {self.type(t['type'])}"

    def type_qualified_path(self, t):
        owner = self.type(t["self_type"])
        if t["trait"] and t["trait"]["path"]:
            owner = f"<{owner} as {self.path(t['trait'])}>"
        return f"{owner}::{t['name']}{self.arguments(t['args'])}"

    def type_function_pointer(self, t):
        inputs = ", ".join(self.type(x) for _, x in t["sig"]["inputs"])
        output = f" -> {self.type(t['sig']['output'])}" if t["sig"]["output"] else ""
        return f"{self.binder(t)}fn({inputs}){output}"


def synthetic(parameter):
    """Whether a parameter stands for an `impl Trait` among the arguments."""
    return parameter["kind"].get("type", {}).get("is_synthetic", False)


def documents():
    """Rustdoc's JSON of each crate, by the crate's name."""
    nightly = subprocess.run(
        [ROOT / "scripts/nightly.sh"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    crates = [
        folder.name
        for folder in sorted((ROOT / "crates").iterdir())
        if (folder / "src/lib.rs").exists() and folder.name not in PROGRAMS
    ]
    target = ROOT / "target/api"
    environment = {
        **os.environ,
        "CARGO_TARGET_DIR": str(target),
        "CARGO_PROFILE_DEV_OPT_LEVEL": "0",  # of procedural macros, which is all that is built
        "RUSTDOCFLAGS": "-Z unstable-options --output-format json",
    }
    packages = [word for crate in crates for word in ("-p", crate)]
    command = ["cargo", f"+{nightly}", "doc", "--quiet", "--lib", "--no-deps", *packages]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    for crate in crates:
        document = json.loads((target / f"doc/{crate.replace('-', '_')}.json").read_text())
        if document["format_version"] != FORMAT:
            raise SystemExit(f"scripts/api.py reads format {FORMAT} of rustdoc's JSON, this is "
                             f"{document['format_version']}")
        yield crate, document


def main(arguments):
    if arguments not in ([], ["--update"]):
        raise SystemExit(__doc__)
    texts = {f"{crate}.txt": Api(document).text() for crate, document in documents()}
    folder = ROOT / "api"
    recorded = {f.name: f.read_text() for f in folder.glob("*.txt")}
    if arguments:
        folder.mkdir(exist_ok=True)
        for name in recorded.keys() - texts.keys():
            (folder / name).unlink()
        for name, text in texts.items():
            (folder / name).write_text(text)
        return 0
    differ = False
    for name in sorted(texts.keys() | recorded.keys()):
        old, new = (t.get(name, "").splitlines() for t in (recorded, texts))
        for line in difflib.unified_diff(old, new, f"api/{name}", "the code", n=0, lineterm=""):
            print(line)
            differ = True
    if differ:
        print("\nThe public API is not what api/ says. When that is meant: scripts/api.py --update")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
