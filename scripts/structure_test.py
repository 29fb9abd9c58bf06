#!/usr/bin/env python3
"""Tests of structure.py on crates made for them. Run: python3 scripts/structure_test.py"""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import structure


class Structure(unittest.TestCase):
    def crate(self, files, name="foveate-planted", depends=""):
        """Writes a crate, and reads it."""
        folder = self.root / "crates" / name
        manifest = f'[package]\nname = "{name}"\n[dependencies]\n{depends}'
        for path, text in {"Cargo.toml": manifest, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return structure.Crate(folder)

    def arrows(self, files):
        """Arrows between a crate's files, without `src/` and `.rs`."""
        crate = self.crate(files)

        def short(file):
            return str(file.relative_to(crate.folder / "src").with_suffix(""))

        return {(short(a), short(b)): set(names) for (a, b), names in crate.arrows().items()}

    def wrong(self, files):
        return self.quietly(structure.modules_of, self.crate(files))

    def quietly(self, run, *arguments):
        """Runs without showing what is printed, which is kept."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            result = run(*arguments)
        self.printed = out.getvalue()
        return result

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def test_a_planted_circle_is_found_with_what_ties_it(self):
        [circle] = self.wrong({
            "src/lib.rs": "mod a; mod b; mod c; mod d;",
            "src/a.rs": "use crate::b::B;\npub struct A(B);",
            "src/b.rs": "use super::c;\npub struct B(c::C);",
            "src/c.rs": "pub struct C;\n\nfn back(a: &crate::a::A) {}",
            "src/d.rs": "use crate::a::A;",
        })
        self.assertEqual(circle.splitlines(), [
            "foveate-planted: a circle of a, b, c",
            "    a.rs -> b.rs: B (line 1)",
            "    b.rs -> c.rs: C (line 2), c (line 1)",
            "    c.rs -> a.rs: A (line 3)",
        ])

    def test_floors_stand_above_what_they_name(self):
        self.assertEqual([], self.wrong({
            "src/lib.rs": "mod a; mod b; mod c;",
            "src/a.rs": "use crate::{b::B, c::C};",
            "src/b.rs": "use crate::c::C; pub struct B;",
            "src/c.rs": "pub struct C;",
        }))
        rows = [line.split() for line in self.printed.splitlines()[2:]]
        self.assertEqual(rows, [
            ["3", "a", "0", "b,", "c"], ["2", "b", "0", "c"], ["1", "c", "0"],
        ])

    def test_a_circle_through_a_folder_is_one_of_the_folder(self):
        [circle] = self.wrong({
            "src/lib.rs": "mod plan; mod other;",
            "src/plan/mod.rs": "mod launch; pub mod kernels;",
            "src/plan/launch.rs": "use crate::other::X;",
            "src/plan/kernels.rs": "pub fn f() {}",
            "src/other.rs": "use crate::plan::kernels::f; pub struct X;",
        })
        self.assertIn("a circle of other, plan", circle)

    def test_a_circle_inside_a_folder_is_found(self):
        [circle] = self.wrong({
            "src/lib.rs": "mod plan;",
            "src/plan.rs": "mod a; mod b; pub use b::B;",
            "src/plan/a.rs": "use super::B; pub struct A;",
            "src/plan/b.rs": "pub struct B(super::a::A);",
        })
        self.assertIn("foveate-planted/plan: a circle of a, b", circle)

    def test_a_face_and_its_folder_are_one(self):
        self.assertEqual([], self.wrong({
            "src/lib.rs": "mod plan;",
            "src/plan.rs": "mod a; use a::A; pub struct Plan(A);",
            "src/plan/a.rs": "use super::Plan; pub struct A;",
        }))
        self.assertIn("what the face defines is taken by a", self.printed)

    def test_names_are_followed_to_the_file_that_defines_them(self):
        arrows = self.arrows({
            "src/lib.rs": "mod a; mod b; mod c; pub use b::*; pub use c::inner::Deep as Renamed;",
            "src/a.rs": "use crate::{Renamed, Two as Other, b}; use super::*;\n"
                        "fn f() { b::One::new(); Three }",
            "src/b.rs": "pub struct One; pub struct Two; pub const Three: u8 = 3;",
            "src/c.rs": "pub mod inner { pub struct Deep; }",
        })
        self.assertEqual(arrows["a", "b"], {"One", "Two", "Three", "b"})
        self.assertEqual(arrows["a", "c"], {"Deep"})
        self.assertNotIn(("a", "lib"), arrows)

    def test_macros_and_what_they_define_belong_to_their_file(self):
        arrows = self.arrows({
            "src/lib.rs": "#[macro_use] mod a; mod b; mod c;",
            "src/a.rs": "macro_rules! make { ($n:ident) => { pub struct $n; } }",
            "src/b.rs": "make!(Made);",
            "src/c.rs": "use crate::b::Made;",
        })
        self.assertEqual(arrows, {("b", "a"): {"make"}, ("c", "b"): {"Made"}})

    def test_tests_comments_and_literals_name_nothing(self):
        arrows = self.arrows({
            "src/lib.rs": "mod a; mod b;\n#[cfg(test)]\nmod tests;",
            "src/a.rs": "// crate::b::B\n/* crate::b /* nested */ crate::b::B */\n"
                        "const S: &str = \"crate::b::B\"; const R: &str = r#\"\" crate::b::B\"#;\n"
                        "const C: [char; 2] = ['\"', '\\''];\n"
                        "fn f<'a>(x: &'a str) { x }\n"
                        "#[cfg(test)]\nuse crate::b::{B, C};\n"
                        "#[cfg(test)]\nimpl<T, U> X { fn f() { crate::b::B } }\n"
                        "struct X { #[cfg(test)] y: crate::b::B, }\n"
                        "#[cfg(all(test, unix))]\nmod tests { use crate::b::B; }\n"
                        "#[cfg(test)] const D: [u8; 2] = { crate::b::B };\n",
            "src/b.rs": "pub struct B; pub struct C;",
        })
        self.assertEqual({a for a in arrows if a[0] == "a"}, set())

    def test_code_that_is_left_out_of_tests_counts(self):
        arrows = self.arrows({
            "src/lib.rs": "mod a; mod b;",
            "src/a.rs": "#[cfg(not(test))]\nuse crate::b::B;",
            "src/b.rs": "pub struct B;",
        })
        self.assertIn(("a", "b"), arrows)

    def test_other_crates_of_the_same_name_are_not_modules(self):
        arrows = self.arrows({
            "src/lib.rs": "mod a; mod half;",
            "src/a.rs": "use half::half; use rayon::prelude::*; fn f() { half::f16 }",
            "src/half.rs": "pub fn f16() {}",
        })
        self.assertEqual(arrows, {})

    def test_a_crate_that_depends_upward_is_found(self):
        table = structure.table_of(
            "| `foveate-low` | the ground | – |\n| `foveate-high` | the roof | low |\n"
        )
        low = self.crate({"src/lib.rs": ""}, "foveate-low", "foveate-high.workspace = true")
        high = self.crate({"src/lib.rs": ""}, "foveate-high")
        wrong = self.quietly(structure.crates_of, [low, high], table)
        self.assertIn(
            "foveate-low depends on foveate-high: not above it in the table of crates", wrong
        )

    def test_the_table_of_crates_says_what_manifests_say(self):
        table = structure.table_of(
            "| `foveate-a` | – | – |\n| `foveate-b` | – | a |\n| `foveate-c` | – | a, b |\n"
            "| `foveate-d` | – | c |\n"
        )
        crates = [
            self.crate({"src/lib.rs": ""}, "foveate-a"),
            self.crate({"src/lib.rs": ""}, "foveate-b", "foveate-a.workspace = true"),
            self.crate({"src/lib.rs": ""}, "foveate-c",
                       "foveate-a.workspace = true\nfoveate-b.workspace = true"),
            self.crate({"src/lib.rs": ""}, "foveate-e"),
        ]
        self.assertEqual(self.quietly(structure.crates_of, crates, table), [
            "docs/architecture.md: the row of foveate-c depends on foveate-a, foveate-b, "
            "its manifest on foveate-b",
            "docs/architecture.md has no row for foveate-e in its table of crates",
            "docs/architecture.md has a row for foveate-d, no crate",
        ])


if __name__ == "__main__":
    unittest.main()
