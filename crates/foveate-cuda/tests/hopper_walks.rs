//! What the Hopper kernels walk, `KeysItem` and `LiveQueries` of `kernels/hopper/backward_keys.cuh` and
//! `LiveKeys` of `kernels/hopper/forward_device.cuh`, compiled for the host and compared with plain loops;
//! and CTAs that wait for each other as the ordered backward does.

#[path = "../src/compile/on_host.rs"]
mod on_host;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use foveate_tensor::random::Random;

const PARAMS: &str = include_str!("../kernels/params.cuh");
const KEYS: &str = include_str!("../kernels/hopper/backward_keys.cuh");
const FORWARD: &str = include_str!("../kernels/hopper/forward_device.cuh");
const TILE_Q: usize = 64;
const TILE_KV: usize = 128;

/// Reads problems from stdin as numbers: sequences, heads of KV, heads that take turns, sharing, whether
/// lists are a head's own, capacity, then sequences, lists, ranks and items.
const MAIN: &str = "
static int number() { int x; if (std::scanf(\"%d\", &x) != 1) std::abort(); return x; }
int main() {
    for (int problems = number(); problems > 0; --problems) {
        BackwardParams p = {};
        std::vector<Sequence> sequences(number());
        p.heads_kv = number();
        p.heads_q = p.heads_kv * FV_GROUP;
        p.interleaved_heads = number();
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
        p.dq_rank_columns = number();
        std::vector<int> ranks(counts.size() * p.dq_rank_columns);
        for (int& rank : ranks) rank = number();
        p.dq_ranks = ranks.data();
        std::vector<Tile> tiles(number());
        for (Tile& tile : tiles) tile.sequence = number(), tile.tile = number();
        p.sequences = sequences.data(), p.tiles = tiles.data(), p.tile_count = tiles.size();
        p.lists.counts = counts.data(), p.lists.runs = runs.data();
        std::vector<int> slots(runs.size());
        for (size_t i = 0; i < slots.size(); ++i) slots[i] = slot_of(i);
        for (int number = 0; number < p.tile_count * int(KeysItem::all_heads(p)); ++number) {
            const KeysItem item = KeysItem::number(p, number);
            const Tile tile = p.tiles[item.tile];
            std::printf(\"%d %d %d: \", tile.sequence, tile.tile, int(item.heads));
            LiveQueries queries = {p, slots.data(), tile, int(item.heads) * ITEM_HEADS};
            while (queries.next())
                std::printf(\"%d %d %d %d %d %d \", queries.sequence, queries.member, queries.tile, int(queries.evaluates), rank(queries), std::max(queries.slot, -1));
            std::printf(\"\\n\");
        }
    }
}
";

/// Reads items of a forward: queries and keys of the sequence, the tile, and its runs. Prints the tiles of
/// keys, from the last one, and the cell of each consumer.
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
        std::vector<int> slots(runs.size());
        for (int i = 0; i < count; ++i) slots[slots.size() - count + i] = slot_of(i);
        if (FV_MASK && count > 0) keys.take_slots(p, slots.data(), slots.back());
        while (keys.next()) {
            std::printf(\"%d %d \", keys.tile, std::max(keys.slot(), -1));
            for (int c = 0; c < CONSUMERS; ++c) std::printf(\"%u \", Step::cell(keys.cells << Step::CELLS, c));
        }
        std::printf(\"\\n\");
    }
}
";

/// Where the mask bits of a run's first tile are, by its number: of every third run nowhere.
const SLOT_OF: &str =
    "static int slot_of(size_t run) { return run % 3 == 0 ? NO_SLOTS : int(run) * 100; }";

/// The same of the tile that is the `offset`-th of run `run`, or -1.
fn slot_of(run: usize, offset: usize) -> i64 {
    if run.is_multiple_of(3) { -1 } else { (run * 100 + offset) as i64 }
}

/// A struct of the kernels, as text.
fn declaration<'a>(file: &'a str, name: &str) -> &'a str {
    let at = file.find(&format!("struct {name} {{")).expect("it is declared");
    let end = file[at..].find("\n};\n").expect("a declaration ends");
    &file[at..at + end + 4]
}

/// `LiveQueries` and what it takes, as text: up to the scheduler that uses them.
fn declarations() -> &'static str {
    let at = KEYS.find("constexpr int ITEM_HEADS").expect("it is declared");
    let end = KEYS[at..].find("#endif").expect("both walks end");
    &KEYS[at..at + end + 7]
}

/// Which kernel walks.
#[derive(Clone, Copy, Debug)]
struct Walk {
    group: usize,
    mask: bool,
    /// `FV_ORDERED_DQ`.
    ordered: bool,
    /// `FV_SPLIT_GQA`.
    split: bool,
}

impl Walk {
    /// Query heads of an item.
    fn item_heads(self) -> usize {
        if self.split { 1 } else { self.group }
    }
}

/// What the walks print for the problems of `input`; nothing without a host compiler.
fn printed(walk: Walk, input: &str) -> Option<String> {
    let Walk { group, mask, ordered, split } = walk;
    let macros = [
        ("GROUP", group),
        ("MASK", mask.into()),
        ("BM", TILE_Q),
        ("BN", TILE_KV),
        ("ORDERED_DQ", ordered.into()),
        ("SPLIT_GQA", split.into()),
        ("MASK_BITS", mask.into()),
    ];
    let rank = match ordered {
        true => "static int rank(const LiveQueries& queries) { return queries.rank(); }",
        false => "static int rank(const LiveQueries&) { return 0; }",
    };
    output(&macros, &[PARAMS, SLOT_OF, declarations(), rank, MAIN].join("\n"), input)
}

/// What a program with these macros prints; nothing without a host compiler.
fn output(macros: &[(&str, usize)], code: &str, input: &str) -> Option<String> {
    let mut text = String::from(
        "#include <cstdio>\n#include <cstdlib>\n#include <vector>\n#include <algorithm>\n\
         #define __device__\nusing std::max;\n\
         template <typename A, typename B> static auto min(A a, B b) { return a < b ? a : b; }\n\
         constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }\n",
    );
    for (name, value) in macros {
        writeln!(text, "#define FV_{name} {value}").unwrap();
    }
    text += code;
    let said = on_host::output(&text, &[], input.as_bytes().to_vec())?;
    Some(String::from_utf8(said).unwrap())
}

/// Consecutive tiles of queries, and whether the mask is evaluated in them.
type Run = (usize, usize, bool);

/// An item's step: the sequence, of those that share keys; the head, of the item's; the tile of queries;
/// whether the mask is evaluated; how many tiles of keys add to it before; and the slot of its mask bits.
type Step = (usize, usize, usize, bool, usize, i64);

/// A tile of queries, whether the mask is evaluated there, and the slot of its mask bits.
type Live = (usize, bool, i64);

struct Problem {
    heads_kv: usize,
    interleaved_heads: usize,
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
        let interleaved_heads = 1 + random.below(heads_kv);
        let mut problem =
            Self { heads_kv, interleaved_heads, sharing, lens, runs: Vec::new(), by_head };
        let rows = problem.rows() * if by_head { heads_kv * group } else { 1 };
        problem.runs = (0..rows).map(|_| Self::runs(random)).collect();
        problem
    }

    /// Runs in the first eight tiles, in order and apart.
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
    fn tiles_of_keys(&self) -> Vec<(usize, usize)> {
        let owners = self.lens.len() / self.sharing;
        (0..owners).flat_map(|s| (0..self.tiles(s)).map(move |tile| (s, tile))).collect()
    }

    /// Those with the heads of an item, in the order in which CTAs take them.
    fn items(&self, walk: Walk) -> Vec<(usize, usize, usize)> {
        let heads: Vec<_> = (0..self.heads_kv * walk.group / walk.item_heads()).collect();
        let together = if walk.mask || walk.ordered { self.interleaved_heads } else { 1 };
        let turns = heads.chunks(together);
        let of_turn = |heads: &[usize]| -> Vec<_> {
            let of_tile = |(s, tile)| heads.iter().map(move |&head| (s, tile, head));
            self.tiles_of_keys().into_iter().flat_map(of_tile).collect()
        };
        turns.flat_map(of_turn).collect()
    }

    /// Tiles of queries that see a tile of keys, in order.
    fn live(&self, mask: bool, sequence: usize, tile: usize, head: usize) -> Vec<Live> {
        if !mask {
            return (0..self.lens[sequence][0].div_ceil(TILE_Q)).map(|i| (i, false, -1)).collect();
        }
        let row =
            self.first_row(sequence) + tile + if self.by_head { head * self.rows() } else { 0 };
        let of_run = |(number, &(start, count, evaluates)): (usize, &Run)| {
            let slot = move |i| slot_of(row * LONGEST_ROW + number, i);
            (0..count).map(move |i| (start + i, evaluates, slot(i))).collect::<Vec<_>>()
        };
        self.runs[row].iter().enumerate().flat_map(of_run).collect()
    }

    /// Tiles of keys before `tile` that tile `i` of queries sees.
    fn rank(&self, mask: bool, sequence: usize, tile: usize, head: usize, i: usize) -> usize {
        let sees = |&j: &usize| self.live(mask, sequence, j, head).iter().any(|of| of.0 == i);
        (0..tile).filter(sees).count()
    }

    fn write(&self, group: usize, text: &mut String) {
        let stride = if self.by_head { self.rows() } else { 0 };
        let numbers = [
            self.lens.len(),
            self.heads_kv,
            self.interleaved_heads,
            self.sharing,
            stride,
            LONGEST_ROW,
        ];
        numbers.iter().for_each(|n| write!(text, "{n} ").unwrap());
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
        write!(text, "{COLUMNS} ").unwrap();
        let heads = if self.by_head { self.heads_kv * group } else { 1 };
        for head in 0..heads {
            for sequence in 0..self.lens.len() {
                for tile in 0..self.tiles(sequence) {
                    for i in 0..COLUMNS {
                        write!(text, "{} ", self.rank(true, sequence, tile, head, i)).unwrap();
                    }
                }
            }
        }
        write!(text, "{} ", self.tiles_of_keys().len()).unwrap();
        for (sequence, tile) in self.tiles_of_keys() {
            write!(text, "{sequence} {tile} ").unwrap();
        }
        text.push('\n');
    }

    /// The steps of each item.
    fn steps(&self, walk: Walk) -> Vec<Vec<Step>> {
        let Walk { mask, ordered, .. } = walk;
        let of_item = |(first, tile, heads): (usize, usize, usize)| {
            let mut steps = Vec::new();
            for i in 0..self.sharing {
                let mut of_sequence = Vec::new();
                for member in 0..walk.item_heads() {
                    let head = heads * walk.item_heads() + member;
                    let mut live = self.live(mask, first + i, tile, head);
                    if ordered {
                        live.reverse();
                    }
                    of_sequence.extend(live.into_iter().map(|(at, evaluates, slot)| {
                        let rank = match ordered {
                            true => self.rank(mask, first + i, tile, head, at),
                            false => 0,
                        };
                        (i, member, at, evaluates, rank, slot)
                    }));
                }
                // One tile of each head in turn.
                if ordered && !(mask && self.by_head) {
                    of_sequence.sort_by_key(|step| std::cmp::Reverse(step.2));
                }
                steps.extend(of_sequence);
            }
            steps
        };
        self.items(walk).into_iter().map(of_item).collect()
    }
}

/// Runs that a row has memory for, and tiles of queries that ranks have.
const LONGEST_ROW: usize = 4;
const COLUMNS: usize = 16;

/// Every walk: of one head a group and of three, with a mask and without.
fn walks() -> impl Iterator<Item = Walk> {
    let bits = (0..16).map(|bits| [1, 2, 4, 8].map(|bit| bits & bit != 0));
    let walks = bits.map(|[grouped, mask, ordered, split]| Walk {
        group: if grouped { 3 } else { 1 },
        mask,
        ordered,
        split,
    });
    walks.filter(|walk| walk.group > 1 || !walk.split)
}

#[test]
fn items_of_keys_walk_every_live_tile_of_queries_of_every_head_and_sequence() {
    for walk in walks() {
        let group = walk.group;
        let mut random = Random::new(group as u64);
        let problems: Vec<_> = (0..300).map(|_| Problem::random(&mut random, group)).collect();
        let mut input = format!("{}\n", problems.len());
        problems.iter().for_each(|problem| problem.write(group, &mut input));
        let Some(text) = printed(walk, &input) else { return };
        let mut lines = text.lines();
        for (number, problem) in problems.iter().enumerate() {
            let items = problem.items(walk).into_iter().zip(problem.steps(walk));
            for (item, ((sequence, tile, heads), steps)) in items.enumerate() {
                let mut line = format!("{sequence} {tile} {heads}: ");
                for (i, member, at, evaluates, rank, slot) in steps {
                    let evaluates = u8::from(evaluates);
                    write!(line, "{i} {member} {at} {evaluates} {rank} {slot} ").unwrap();
                }
                let at = format!("{walk:?}, problem {number}, item {item}");
                assert_eq!(lines.next(), Some(&line[..]), "{at}");
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
            for (number, (start, count, cells)) in runs.iter().enumerate().rev() {
                for i in (0..*count).rev() {
                    let slot = if mask { slot_of(number, i) } else { -1 };
                    write!(line, "{} {slot} ", start + i).unwrap();
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
            ("MASK_BITS", mask.into()),
            ("CONSUMERS", consumers),
        ];
        let structs = ["Cells", "Step", "LiveKeys"].map(|name| declaration(FORWARD, name));
        let constants = "constexpr int CONSUMERS = FV_CONSUMERS;\n";
        let code =
            [&[PARAMS, SLOT_OF, constants][..], &structs, &[FORWARD_MAIN]].concat().join("\n");
        let Some(text) = output(&macros, &code, &input) else { return };
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted, "{consumers} consumers, mask {mask}");
    }
}

/// Some CTAs, the next item of each from a counter, each step after those of lower rank: whatever CTA goes
/// on first, all items end, and every tile of queries is added to in the same order.
#[test]
fn ctas_that_wait_for_their_rank_never_wait_for_each_other() {
    let mut waited = 0;
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let ordered: Vec<_> = walks().filter(|walk| walk.ordered).collect();
        let walk = ordered[random.below(ordered.len())];
        let problem = Problem::random(&mut random, walk.group);
        let (items, steps) = (problem.items(walk), problem.steps(walk));
        let mut ctas = vec![(0, 0); 1 + random.below(7)];
        let mut taken = 0;
        // The item and step of each CTA; one that has taken the number after the last item is done.
        let mut take = || {
            taken += 1;
            (taken - 1, 0)
        };
        ctas.iter_mut().for_each(|cta| *cta = take());
        let mut added: BTreeMap<(usize, usize, usize), Vec<usize>> = BTreeMap::new();
        loop {
            let mut can_go = Vec::new();
            for (number, (item, step)) in ctas.iter().enumerate().filter(|(_, c)| c.0 < items.len())
            {
                let Some(&(i, member, at, _, rank, _)) = steps[*item].get(*step) else {
                    can_go.push((number, None));
                    continue;
                };
                let (first, _, heads) = items[*item];
                let key = (first + i, heads * walk.item_heads() + member, at);
                let before = added.get(&key).map_or(0, Vec::len);
                assert!(before <= rank, "seed {seed}: item {item} is passed over at {key:?}");
                if before == rank {
                    can_go.push((number, Some(key)));
                } else {
                    waited += 1;
                }
            }
            if ctas.iter().all(|cta| cta.0 >= items.len()) {
                break;
            }
            assert!(!can_go.is_empty(), "seed {seed}: {ctas:?} wait for each other");
            let (number, key) = can_go[random.below(can_go.len())];
            match key {
                Some(key) => {
                    added.entry(key).or_default().push(items[ctas[number].0].1);
                    ctas[number].1 += 1;
                }
                None => ctas[number] = take(),
            }
        }
        for (key, tiles) in added {
            assert!(tiles.is_sorted(), "seed {seed}: {tiles:?} add to {key:?}");
        }
    }
    assert!(waited > 1000, "nobody waits: {waited}");
}
