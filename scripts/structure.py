#!/usr/bin/env python3
"""Prints which crate stands on which, and inside each crate which module stands on which, and
fails where something stands on itself.

    scripts/structure.py                      everything
    scripts/structure.py foveate-cuda         the crates, and the modules of these

Crates: the table of crates in docs/architecture.md is their order from the ground up. A crate
depends on rows above its own only, and its row names what it depends on, less what follows from
that.

Modules: an arrow from `a` to `b` says that a file of `a` names something that a file of `b`
defines, in a `use` or in a path. `crate`, `self`, `super`, aliases, globs, `pub use` and macros
are followed to the file that defines the name. A module and its own folder count as one:
`plan/mod.rs`, or `plan.rs` beside `plan/`, is the face of that folder, and the files in it may take
what the face defines. So a module is compared with its siblings, in every folder: it stands on a
floor above all those that it names. Siblings that name each other in a circle have no such floors,
which is an error, printed with the names that tie them.

Left out are tests (`#[cfg(test)]`, `tests/`), examples and benches. Not seen are method calls,
which name no path; the type or the trait of the method is mostly named somewhere near.
"""

import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
  | (?P<comment>/\*)
  | (?P<raw>(?:br|cr|r)(?P<hashes>\#*)")
  | (?P<text>[bc]?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n']*'|\\''|[^'\\\n]'))
  | (?P<lifetime>'\w+)
  | (?P<name>(?:r\#)?[A-Za-z_]\w*)
  | (?P<number>\d\w*(?:\.\d\w*)?)
  | (?P<mark>::|=>|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)
OPEN, CLOSE = {"(", "[", "{"}, {")", "]", "}"}
DEFINES = {"fn", "struct", "enum", "union", "trait", "type", "const", "static"}
MODIFIERS = {"pub", "unsafe", "async", "extern", "mut"}
ITEMS = DEFINES | MODIFIERS | {"mod", "use", "impl", "macro_rules"}


def tokens_of(text):
    """The names, numbers and marks of Rust source, each with its line, without comments and the
    contents of literals."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        kind, end = found.lastgroup, found.end()
        if kind == "comment":
            depth = 1
            while depth and end < len(text):
                depth += {"/*": 1, "*/": -1}.get(text[end : end + 2], 0)
                end += 2 if text[end : end + 2] in ("/*", "*/") else 1
        elif found["raw"]:
            close = '"' + found["hashes"]
            end = text.index(close, end) + len(close)
            tokens.append(("text", "", line))
        elif kind == "text":
            tokens.append(("text", found["text"], line))
        elif kind in ("name", "number", "mark"):
            tokens.append((kind, found[kind].removeprefix("r#"), line))
        line += text.count("\n", at, end)
        at = end
    return tokens


class Module:
    """A module of a crate: its file, the names that it defines or takes, and what it mentions."""

    def __init__(self, file, parent):
        self.file, self.parent = file, parent
        self.root = parent.root if parent else self
        self.children = {}
        self.defined = set()
        self.aliases = defaultdict(set)  # name -> paths of `use`
        self.globs = set()
        self.paths = {}  # path of two or more names, in code or a `use` -> first line
        self.words = {}  # single name -> first line
        self.calls = {}  # macro -> first line


class Crate:
    """A crate's manifest and modules."""

    def __init__(self, folder):
        self.folder = folder
        manifest = tomllib.loads((folder / "Cargo.toml").read_text())
        self.name = manifest["package"]["name"]
        self.depends = set()
        for tables in (manifest, *manifest.get("target", {}).values()):
            for kind in ("dependencies", "build-dependencies"):
                self.depends |= set(tables.get(kind, {}))
        self.modules, self.macros, self.lines = [], defaultdict(set), {}
        self.roots = [f for f in (folder / "src/lib.rs", folder / "src/main.rs") if f.exists()]
        for file in self.roots:
            self.read(Module(file, None), file.parent)

    def read(self, module, folder):
        """Reads the file of a module whose children lie in `folder`."""
        text = module.file.read_text()
        self.lines[module.file] = text.count("\n")
        self.scan(module, tokens_of(text), folder)

    def scan(self, module, tokens, folder):
        """Notes what the tokens of a module define and mention, and reads its children."""
        self.modules.append(module)
        i, depth, elsewhere = 0, 0, None
        while i < len(tokens):
            kind, word, line = tokens[i]
            after = [t[1] for t in tokens[i + 1 : i + 3]] + ["", ""]
            if word == "#" and "[" in after[:2]:
                start = i + 1 + after.index("[")
                end = closing(tokens, start)
                attribute = [t[1] for t in tokens[start + 1 : end]]
                if for_tests(attribute):
                    end = end_of_item(tokens, end + 1)
                elif attribute[:2] == ["path", "="]:
                    elsewhere = attribute[2].strip('"')
                else:
                    mention(module, tokens[start + 1 : end])
                i = end + 1
            elif word == "mod" and after[1] in (";", "{"):
                child = module.children[after[0]] = Module(module.file, module)
                inside = folder / after[0]
                if after[1] == "{":
                    end = closing(tokens, i + 2)
                    self.scan(child, tokens[i + 3 : end], inside)
                    i = end + 1
                else:
                    beside = [folder / f"{after[0]}.rs", inside / "mod.rs"]
                    if elsewhere:
                        beside = [module.file.parent / elsewhere]
                    child.file = next((f for f in beside if f.exists()), None)
                    if child.file is None:
                        raise SystemExit(f"{module.file}:{line}: no file for `mod {after[0]};`")
                    self.read(child, inside)
                    i += 3
                elsewhere = None
            elif word == "use" and after[0] != "<":
                end = next(j for j in range(i, len(tokens)) if tokens[j][1] == ";")
                note_use(module, tokens[i + 1 : end], ())
                i = end + 1
            elif word == "macro_rules" and after[0] == "!":
                self.macros[tokens[i + 2][1]].add(module.file)
                i += 3
            else:
                if depth == 0 and word in DEFINES and after[0] not in DEFINES | MODIFIERS:
                    module.defined.add(after[0])
                depth += (word in OPEN) - (word in CLOSE)
                i = mention_at(module, tokens, i)

    def find(self, module, path, seen=frozenset()):
        """What a path names, as {(module, name)} of definitions, the name None where it is the
        module itself; nothing for names of other crates. A name that a module is said to have and
        that is not found in it is defined by a macro there."""
        if path[0] not in ("crate", "self", "super"):
            return self.member(module, path, seen)
        start = {"crate": module.root, "self": module, "super": module.parent}[path[0]]
        return self.inside(start, path[1:], seen)

    def inside(self, module, rest, seen):
        if not rest:
            return {(module, None)}
        return self.member(module, rest, seen) or {(module, rest[0])}

    def member(self, module, path, seen):
        """What a path names whose first name is one that `module` defines or takes."""
        if (module, path) in seen:
            return set()
        seen = seen | {(module, path)}
        first, rest = path[0], path[1:]
        if first == "super":
            return self.find(module, path, seen)
        found = set()
        if first in module.children:
            found |= self.inside(module.children[first], rest, seen)
        if first in module.defined:
            found.add((module, first))
        for target in module.aliases.get(first, ()):
            if target[0] != first:  # otherwise it is another crate's
                found |= self.find(module, target + rest, seen)
        if not found:
            for glob in module.globs:
                for target in self.modules_at(module, glob):
                    found |= self.member(target, path, seen)
        return found

    def modules_at(self, module, glob):
        """The modules of this crate whose names `use glob::*` takes."""
        if glob[0] in ("crate", "self", "super") or glob[0] in module.children:
            return {m for m, name in self.find(module, glob) if name is None}
        targets = {a + glob[1:] for a in module.aliases.get(glob[0], ()) if a[0] != glob[0]}
        return {m for target in targets for m in self.modules_at(module, target)}

    def arrows(self):
        """{(file, file that it takes names from): {name: line}}."""
        arrows = defaultdict(dict)
        for module in self.modules:
            mentioned = list(module.paths.items())
            if module.globs:
                known = module.defined | set(module.aliases) | set(module.children)
                mentioned += [((w,), n) for w, n in module.words.items() if w not in known]
            for path, line in mentioned:
                for target, name in self.find(module, path):
                    arrows[module.file, target.file].setdefault(name or path[-1], line)
            for macro, line in module.calls.items():
                owners = self.macros.get(macro, ())
                if len(owners) == 1:
                    arrows[module.file, *owners].setdefault(macro, line)
        return {(a, b): names for (a, b), names in arrows.items() if a != b}


def mention(module, tokens):
    """Notes all that these tokens mention."""
    i = 0
    while i < len(tokens):
        i = mention_at(module, tokens, i)


def mention_at(module, tokens, i):
    """Notes the path, name or macro that starts at a token, if one does, and returns the index
    after it."""
    kind, word, line = tokens[i]
    if kind != "name":
        return i + 1
    path = [word]
    while i + 2 < len(tokens) and tokens[i + 1][1] == "::" and tokens[i + 2][0] == "name":
        path.append(tokens[i + 2][1])
        i += 2
    if len(path) > 1:
        module.paths.setdefault(tuple(path), line)
    elif i + 1 < len(tokens) and tokens[i + 1][1] == "!":
        module.calls.setdefault(word, line)
    else:
        module.words.setdefault(word, line)
    return i + 1


def note_use(module, tokens, before):
    """Notes the aliases, globs and paths of a `use` tree."""
    path = list(before)
    for i, (kind, word, line) in enumerate(tokens):
        if word == "{":
            start, depth = i + 1, 0
            for j in range(i + 1, len(tokens)):
                if tokens[j][1] in (",", "}") and depth == 0:
                    if j > start:
                        note_use(module, tokens[start:j], path)
                    start = j + 1
                depth += (tokens[j][1] == "{") - (tokens[j][1] == "}")
            return
        if word == "*":
            module.globs.add(tuple(path))
            return
        if word == "as":
            break
        if kind == "name" and not (word == "self" and path):
            path.append(word)
    alias = tokens[-1][1] if tokens[-1][1] != "self" else path[-1]
    module.aliases[alias].add(tuple(path))
    module.paths.setdefault(tuple(path), tokens[0][2])


def closing(tokens, i):
    """The index of the bracket that closes the one at `i`."""
    depth = 0
    for j in range(i, len(tokens)):
        depth += (tokens[j][1] in OPEN) - (tokens[j][1] in CLOSE)
        if depth == 0:
            return j
    return len(tokens) - 1


def for_tests(attribute):
    """Whether an attribute leaves its item out of everything but tests."""
    cfg = attribute[:2] == ["cfg", "("]
    return cfg and (attribute[2:] == ["test", ")"] or attribute[2:6] == ["all", "(", "test", ","])


def end_of_item(tokens, i):
    """The index of the last token of the item, field or arm that starts at `i`."""
    while tokens[i][1] == "#":
        i = closing(tokens, i + 1) + 1
    item = tokens[i][1] in ITEMS
    ends_at_brace = True
    while True:
        word = tokens[i][1]
        if word in ("use", "const", "static", "type") and tokens[i + 1][1] != "fn":
            ends_at_brace = False
        if word in OPEN:
            i = closing(tokens, i)
            if word == "{" and ends_at_brace:
                return i
        elif word in CLOSE:
            return i - 1
        elif word == ";" or word == "," and not item:
            return i
        i += 1


def place_of(crate, file):
    """The names of the modules from the crate's root to that of a file."""
    if file in crate.roots:
        return ()
    parts = file.relative_to(crate.folder / "src").with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


def floors_of(nodes, stands_on):
    """Each node's floor, and the circles: sets of nodes that stand on each other."""
    index, low, stack, circles, floor = {}, {}, [], [], {}

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in stands_on[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            below = {o for n in group for o in stands_on[n]} - group
            for n in group:
                floor[n] = 1 + max((floor[o] for o in below), default=0)
            if len(group) > 1:
                circles.append(group)

    for node in sorted(nodes):
        if node not in index:
            visit(node)
    return floor, circles


def modules_of(crate):
    """Prints the floors of a crate's modules, folder by folder, and returns its circles."""
    places = {file: place_of(crate, file) for file in crate.lines}
    folders = defaultdict(set)  # place of a folder -> names in it
    lines = defaultdict(int)  # place of a module -> lines, those of its folder included
    for file, place in places.items():
        for depth, name in enumerate(place):
            folders[place[:depth]].add(name)
            lines[place[: depth + 1]] += crate.lines[file]
    stands_on = defaultdict(lambda: defaultdict(set))
    on_face = defaultdict(set)
    ties = defaultdict(list)
    for (file, other), names in crate.arrows().items():
        a, b = places[file], places[other]
        shared = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        folder = a[:shared]
        if shared < len(a) and shared < len(b):
            stands_on[folder][a[shared]].add(b[shared])
            ties[folder, a[shared], b[shared]].append((file, other, names))
        elif shared < len(a):
            on_face[folder].add(a[shared])
    wrong = []
    for folder in sorted(folders):
        title = "/".join((crate.name, *folder))
        floor, circles = floors_of(folders[folder], stands_on[folder])

        def downward(names):
            return sorted(names, key=lambda name: (-floor[name], name))

        print(f"\n{title}")
        for name in downward(floor):
            slash = "/" if (*folder, name) in folders else ""
            size = lines[*folder, name]
            below = ", ".join(downward(stands_on[folder][name]))
            print(f"{floor[name]:4}  {name + slash:<20}{size:6}  {below}".rstrip())
        if on_face[folder]:
            print(f"      what the face defines is taken by {', '.join(downward(on_face[folder]))}")
        for circle in circles:
            message = [f"{title}: a circle of {', '.join(sorted(circle))}"]
            for a, b in sorted((a, b) for a in circle for b in stands_on[folder][a] & circle):
                for file, other, names in ties[folder, a, b]:
                    shown = [f"{name} (line {line})" for name, line in sorted(names.items())]
                    if len(shown) > 4:
                        shown[4:] = [f"{len(shown) - 4} more"]
                    file, other = (f.relative_to(crate.folder / "src") for f in (file, other))
                    message.append(f"    {file} -> {other}: {', '.join(shown)}")
            wrong.append("\n".join(message))
    return wrong


def crates_of(crates, table):
    """Prints the floors of the crates, and returns where they differ from the table in docs."""
    stands_on = {c.name: c.depends & {c.name for c in crates} for c in crates}
    floor, circles = floors_of(stands_on, stands_on)
    wrong = [f"a circle of crates: {', '.join(sorted(c))}" for c in circles]

    def reached(name, seen):
        for other in stands_on[name] - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    def listed(names):
        return ", ".join(sorted(names)) or "nothing"

    print("crates")
    order = list(table)
    for name in sorted(floor, key=lambda name: (-floor[name], name)):
        follows = {o for other in stands_on[name] for o in reached(other, set())}
        direct = stands_on[name] - follows
        print(f"{floor[name]:4}  {name:<26}  {', '.join(sorted(direct))}".rstrip())
        if name not in table:
            wrong.append(f"docs/architecture.md has no row for {name} in its table of crates")
            continue
        upward = [o for o in order[order.index(name) :] if o in stands_on[name]]
        if upward:
            wrong.append(f"{name} depends on {listed(upward)}: not above it in the table of crates")
        if table[name] != direct:
            wrong.append(
                f"docs/architecture.md: the row of {name} depends on {listed(table[name])}, "
                f"its manifest on {listed(direct)}"
            )
    wrong += [f"docs/architecture.md has a row for {n}, no crate" for n in order if n not in floor]
    return wrong


def table_of(architecture):
    """{crate: crates it depends on} in the order of the rows of the table of crates."""
    table = {}
    for row in architecture.splitlines():
        cells = [c.strip() for c in row.strip().strip("|").split("|")]
        if row.startswith("|") and re.fullmatch(r"`foveate[\w-]*`", cells[0]) and len(cells) == 3:
            name = cells[0].strip("`")
            short = re.findall(r"[a-z][\w-]*", cells[2])
            table[name] = {s if s.startswith("foveate") else f"foveate-{s}" for s in short}
    return table


def main(root, chosen):
    crates = [Crate(m.parent) for m in sorted((root / "crates").glob("*/Cargo.toml"))]
    unknown = set(chosen) - {c.name for c in crates}
    if unknown:
        raise SystemExit(f"no crate {', '.join(sorted(unknown))}")
    wrong = crates_of(crates, table_of((root / "docs/architecture.md").read_text()))
    for crate in crates:
        if not chosen or crate.name in chosen:
            wrong += modules_of(crate)
    for message in wrong:
        print(f"\nwrong: {message}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, sys.argv[1:]))
