//! What the Hopper kernels walk, `LiveQueries` of `kernels/hopper/backward_keys.cuh` and `LiveKeys` of
//! `kernels/hopper/forward_device.cuh`, compiled for the host and compared with plain loops.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use foveate_tensor::random::Random;

const PARAMS: &str = include_str!("../kernels/params.cuh");
const KEYS: &str = include_str!("../kernels/hopper/backward_keys.cuh");
const FORWARD: &str = include_str!("../kernels/hopper/forward_device.cuh");
const TILE_Q: usize = 64;
const TILE_KV: usize = 128;

/// Reads problems from stdin as numbers: sequences, heads of KV, sharing, whether lists are a head's
/// own, capacity, then sequences, lists and items.
const MAIN: &str = "
static int number() { int x; if (std::scanf(\"%d\", &x) != 1) std::abort(); return x; }
int main() {
    for (int problems = number(); problems > 0; --problems) {
        BackwardParams p = {};
        std::vector<Sequence> sequences(number());
        p.heads_kv = number();
        p.sharing = number();
        p.lists.head_stride = number();
        p.lists.capacity = number();
        for (Sequence& s : sequences) s.q_len = number(), s.k_len = number(), s.first_row = number();
        std::vector<int> counts(number());
        std::vector<Run> runs(counts.size() * p.lists.capacity);
        for (size_t row = 0; row < counts.size(); ++row) {
            counts[row] = number();
            for (int i = 0; i < counts[row]; ++i) {
                Run& run = runs[row * p.lists.capacity + i];
                run.first = number();
                run.count_kind = number();
            }
        }
        std::vector<Tile> tiles(number());
        for (Tile& tile : tiles) tile.sequence = number(), tile.tile = number();
        p.sequences = sequences.data(), p.tiles = tiles.data(), p.tile_count = tiles.size();
        p.lists.counts = counts.data(), p.lists.runs = runs.data();
        for (int item = 0; item < p.tile_count * p.heads_kv; ++item) {
            LiveQueries queries = {p, tiles[item % p.tile_count], item / p.tile_count};
            while (queries.next()) {
                std::printf(\"%d %d %d %d \", queries.sequence, queries.member, queries.tile, int(queries.evaluates));
                ++queries.tile;
            }
            std::printf(\"\\n\");
        }
    }
}
";

/// Reads items of a forward: queries and keys of the sequence, the tile, and its runs. Prints the tiles of keys, from the
/// last one, and the cell of each consumer.
const FORWARD_MAIN: &str = "
static int number() { int x; if (std::scanf(\"%d\", &x) != 1) std::abort(); return x; }
int main() {
    for (int items = number(); items > 0; --items) {
        Sequence sequence = {};
        sequence.q_len = number(), sequence.k_len = number(), sequence.first_row = 2;
        const int tile = number();
        const int count = number();
        ForwardParams p = {};
        p.lists.capacity = count;
        p.lists.head_stride = 3;
        // The rows before that of head 1 are none that there are.
        std::vector<Run> runs((2 + tile + 3) * count, Run{-1, -1});
        for (int i = 0; i < count; ++i) {
            const int first = number();
            runs.push_back({first, number()});
        }
        p.lists.runs = runs.data();
        LiveKeys keys(p, sequence, tile, 1, count, count == 0 ? Run{} : runs.back());
        while (keys.next()) {
            std::printf(\"%d \", keys.tile);
            for (int c = 0; c < CONSUMERS; ++c) std::printf(\"%u \", Step::cell(keys.cells << Step::CELLS, c));
        }
        std::printf(\"\\n\");
    }
}
";

/// A struct of the kernels, as text.
fn declaration<'a>(file: &'a str, name: &str) -> &'a str {
    let at = file.find(&format!("struct {name} {{")).expect("it is declared");
    let end = file[at..].find("\n};\n").expect("a declaration ends");
    &file[at..at + end + 4]
}

/// What the walks print for the problems of `input`; nothing without a host compiler.
fn printed(group: usize, mask: bool, input: &str) -> Option<String> {
    let macros = [("GROUP", group), ("MASK", mask.into()), ("BM", TILE_Q), ("BN", TILE_KV)];
    output(&macros, &[PARAMS, declaration(KEYS, "LiveQueries"), MAIN].join("\n"), input)
}

/// What a program with these macros prints; nothing without a host compiler.
fn output(macros: &[(&str, usize)], code: &str, input: &str) -> Option<String> {
    let mut text = String::from(
        "#include <cstdio>\n#include <cstdlib>\n#include <vector>\n#include <algorithm>\n\
         #define __device__\nusing std::max;\nusing std::min;\n\
         constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }\n",
    );
    for (name, value) in macros {
        writeln!(text, "#define FV_{name} {value}").unwrap();
    }
    text += code;
    let folder = tempfile::tempdir().unwrap();
    let (code, program) = (folder.path().join("walks.cpp"), folder.path().join("walks"));
    std::fs::write(&code, text).unwrap();
    let mut compiler = Command::new("c++");
    let said = match compiler.args(["-std=c++17", "-w", "-o"]).args([&program, &code]).output() {
        Err(error) => {
            println!("skipped: no C++ compiler `c++`: {error}");
            return None;
        }
        Ok(said) => said,
    };
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let mut child =
        Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_owned());
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "the program ended with {}", output.status);
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Consecutive tiles of queries, and whether the mask is evaluated in them.
type Run = (usize, usize, bool);

struct Problem {
    heads_kv: usize,
    sharing: usize,
    /// Queries and keys of each sequence.
    lens: Vec<[usize; 2]>,
    /// Of tile `j` of the first of the sequences that share keys, for each of them and each head.
    runs: Vec<Vec<Run>>,
    by_head: bool,
}

impl Problem {
    fn random(random: &mut Random, group: usize) -> Self {
        let heads_kv = 1 + random.below(3);
        let shared = random.below(3) == 0;
        let keys = random.below(700);
        let lens: Vec<_> = (0..1 + random.below(3))
            .map(|_| [random.below(600), if shared { keys } else { random.below(700) }])
            .collect();
        let (sharing, by_head) = (if shared { lens.len() } else { 1 }, random.below(2) == 0);
        let mut problem = Self { heads_kv, sharing, lens, runs: Vec::new(), by_head };
        let rows = problem.rows() * if by_head { heads_kv * group } else { 1 };
        problem.runs = (0..rows).map(|_| Self::runs(random)).collect();
        problem
    }

    fn runs(random: &mut Random) -> Vec<Run> {
        let (mut runs, mut first) = (Vec::new(), 0);
        for _ in 0..random.below(4) {
            let (start, count) = (first + random.below(3), random.below(4));
            runs.push((start, count, random.below(2) == 0));
            first = start + count;
        }
        runs
    }

    fn tiles(&self, sequence: usize) -> usize {
        self.lens[sequence][1].div_ceil(TILE_KV)
    }

    fn first_row(&self, sequence: usize) -> usize {
        (0..sequence).map(|s| self.tiles(s)).sum()
    }

    fn rows(&self) -> usize {
        self.first_row(self.lens.len())
    }

    /// The tiles of keys: of the first sequence alone where all share its keys.
    fn items(&self) -> Vec<(usize, usize)> {
        let owners = self.lens.len() / self.sharing;
        (0..owners).flat_map(|s| (0..self.tiles(s)).map(move |tile| (s, tile))).collect()
    }

    fn write(&self, text: &mut String) {
        let stride = if self.by_head { self.rows() } else { 0 };
        write!(text, "{} {} {} {stride} 4 ", self.lens.len(), self.heads_kv, self.sharing).unwrap();
        for (i, [q, k]) in self.lens.iter().enumerate() {
            write!(text, "{q} {k} {} ", self.first_row(i)).unwrap();
        }
        write!(text, "{} ", self.runs.len()).unwrap();
        for runs in &self.runs {
            write!(text, "{} ", runs.len()).unwrap();
            for (first, count, evaluates) in runs {
                write!(text, "{first} {} ", 2 * count + usize::from(*evaluates)).unwrap();
            }
        }
        write!(text, "{} ", self.items().len()).unwrap();
        for (sequence, tile) in self.items() {
            write!(text, "{sequence} {tile} ").unwrap();
        }
        text.push('\n');
    }

    /// The steps of each item, as the program prints them.
    fn steps(&self, group: usize, mask: bool) -> Vec<String> {
        let mut lines = Vec::new();
        for head_kv in 0..self.heads_kv {
            for (first, tile) in self.items() {
                let mut line = String::new();
                for i in 0..self.sharing {
                    let of_queries = self.lens[first + i][0].div_ceil(TILE_Q);
                    for member in 0..group {
                        let head = if self.by_head { head_kv * group + member } else { 0 };
                        let row = self.first_row(first + i) + tile + head * self.rows();
                        let whole = [(0, of_queries, false)];
                        let runs = if mask { &self.runs[row][..] } else { &whole };
                        for &(start, count, evaluates) in runs {
                            for tile in start..start + count {
                                write!(line, "{i} {member} {tile} {} ", i32::from(evaluates))
                                    .unwrap();
                            }
                        }
                    }
                }
                lines.push(line);
            }
        }
        lines
    }
}

#[test]
fn items_of_keys_walk_every_live_tile_of_queries_of_every_head_and_sequence() {
    for (group, mask) in [(1, false), (1, true), (3, false), (3, true)] {
        let mut random = Random::new(group as u64);
        let problems: Vec<_> = (0..300).map(|_| Problem::random(&mut random, group)).collect();
        let mut input = format!("{}\n", problems.len());
        problems.iter().for_each(|problem| problem.write(&mut input));
        let Some(text) = printed(group, mask, &input) else { return };
        let mut lines = text.lines();
        for (number, problem) in problems.iter().enumerate() {
            for (item, steps) in problem.steps(group, mask).into_iter().enumerate() {
                let at = format!("group {group}, mask {mask}, problem {number}, item {item}");
                assert_eq!(lines.next(), Some(&steps[..]), "{at}");
            }
        }
        assert_eq!(lines.next(), None);
    }
}

#[test]
fn items_of_queries_walk_their_runs_from_the_last_tile_with_a_cell_for_each_consumer() {
    for (consumers, mask) in (1..4).flat_map(|n| [(n, false), (n, true)]) {
        let tile_q = 64 * consumers;
        let mut random = Random::new(consumers as u64);
        let (mut input, mut wanted) = ("500\n".to_owned(), Vec::new());
        for _ in 0..500 {
            let (q_len, k_len) = (1 + random.below(900), random.below(900));
            let tile = random.below(q_len.div_ceil(tile_q));
            let (mut runs, mut first) = (Vec::new(), 0);
            for _ in 0..random.below(5) {
                let (start, count) = (first + random.below(3), 1 + random.below(4));
                // Whether a consumer's cell is live, and whether its mask is evaluated.
                let mut cells: Vec<[bool; 2]> =
                    (0..consumers).map(|_| [random.below(3) > 0, random.below(2) == 0]).collect();
                cells[0][0] |= consumers == 1;
                runs.push((start, count, cells));
                first = start + count;
            }
            write!(input, "{q_len} {k_len} {tile} {} ", runs.len()).unwrap();
            for (start, count, cells) in &runs {
                let bit = |i: usize| usize::from(cells[i / 2][i % 2]) << i;
                let kind = match consumers {
                    1 => count << 1 | usize::from(cells[0][1]),
                    _ => count << (2 * consumers) | (0..2 * consumers).map(bit).sum::<usize>(),
                };
                write!(input, "{start} {kind} ").unwrap();
            }
            if !mask {
                let has_rows = |c: usize| [tile * tile_q + c * 64 < q_len, false];
                let cells = (0..consumers).map(has_rows).collect();
                runs = vec![(0, k_len.div_ceil(TILE_KV), cells)];
            }
            let mut line = String::new();
            for (start, count, cells) in runs.iter().rev() {
                for tile in (*start..start + count).rev() {
                    write!(line, "{tile} ").unwrap();
                    for [live, evaluates] in cells {
                        write!(line, "{} ", u8::from(*live) + 2 * u8::from(*evaluates)).unwrap();
                    }
                }
            }
            wanted.push(line);
        }
        let macros = [
            ("GROUP", 1),
            ("MASK", mask.into()),
            ("BM", tile_q),
            ("BN", TILE_KV),
            ("CONSUMERS", consumers),
        ];
        let structs = ["Cells", "Step", "LiveKeys"].map(|name| declaration(FORWARD, name));
        let constants = "constexpr int CONSUMERS = FV_CONSUMERS;\n";
        let code = [&[PARAMS, constants][..], &structs, &[FORWARD_MAIN]].concat().join("\n");
        let Some(text) = output(&macros, &code, &input) else { return };
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted, "{consumers} consumers, mask {mask}");
    }
}
