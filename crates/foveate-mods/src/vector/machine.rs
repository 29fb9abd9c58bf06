//! The registers of a program at work over a tile, and where its nodes' values are in them.

use std::ops::Range;

use super::compile::{Compiled, Place, RegisterKind, TileProgram};
use super::outside::Outside;
use super::registers::{LANES, Operand, Register, Scores, padded};
use crate::eval::OutOfRange;
use crate::point::{Head, Point};
use crate::value::ScalarValue;

/// Entries of a strip: each value of one takes a few KiB.
const STRIP: usize = 1024;
/// Rows that a strip may have however wide it is.
const STRIP_ROWS: usize = 12;

/// What a step runs over.
#[derive(Clone, Copy)]
pub(super) enum View<'a> {
    /// The queries of the tile; so for keys and diagonals. The width is whole groups.
    Rows {
        width: usize,
    },
    Columns {
        width: usize,
    },
    Diagonals {
        width: usize,
    },
    /// The machine's strip.
    Strip(Scores<'a>),
}

/// The registers of a [`TileProgram`] at work. Calls go from outside in: [`Self::set_head`],
/// [`Self::set_tile`], then [`Self::run`] for strips of its rows, then what reads the roots.
#[derive(Debug)]
pub struct Machine {
    pub(super) program: TileProgram,
    /// Values of the nodes that change with the head, and their bits.
    pub(super) scalars: Vec<ScalarValue>,
    pub(super) values: Vec<f32>,
    pub(super) registers: Vec<Register>,
    pub(super) head: Head,
    pub(super) q: Range<i32>,
    pub(super) kv: Range<i32>,
    /// Rows and columns, whole groups, that were run last.
    pub(super) strip: (Range<usize>, Range<usize>),
    /// Scratch for row-major buffer positions.
    pub(super) positions: Vec<usize>,
    /// Scratch for mask bits: planes, and those of distances.
    pub(super) planes: Vec<Vec<u64>>,
    pub(super) diagonal: Vec<u64>,
    pub(super) outside: Outside,
    /// The first that counts.
    pub(super) out_of_range: Option<OutOfRange>,
    pub(super) largest: [usize; 2],
}

impl TileProgram {
    /// A machine for tiles of at most `rows` queries and `columns` keys.
    pub fn machine(&self, rows: usize, columns: usize) -> Machine {
        Machine::new(self.clone(), rows, columns)
    }
}

impl Machine {
    fn new(program: TileProgram, rows: usize, columns: usize) -> Self {
        let compiled = &program.0;
        let [rows, columns] = [padded(rows.max(1)), padded(columns.max(1))];
        let len = |kind: &RegisterKind| match kind {
            RegisterKind::Row => rows,
            RegisterKind::Column => columns,
            RegisterKind::Diagonal => rows + columns,
            RegisterKind::Full => STRIP.max(STRIP_ROWS * columns),
        };
        let nodes = compiled.places.len();
        Self {
            registers: compiled.registers.iter().map(|kind| Register::new(len(kind))).collect(),
            scalars: vec![ScalarValue::I32(0); nodes],
            values: vec![0.0; nodes],
            head: Head::default(),
            q: 0..0,
            kv: 0..0,
            strip: Default::default(),
            positions: vec![0; rows + columns],
            planes: Vec::new(),
            diagonal: Vec::new(),
            outside: Outside::default(),
            out_of_range: None,
            largest: [rows, columns],
            program,
        }
    }

    /// Rows that a strip of so many columns may have: twelve at least.
    pub fn strip_rows(columns: usize) -> usize {
        (STRIP / padded(columns).max(LANES)).max(STRIP_ROWS)
    }

    pub(super) fn set_strip(&mut self, rows: Range<usize>, columns: Range<usize>) {
        assert!(rows.end <= self.q.len() && columns.end <= padded(self.kv.len()), "in the tile");
        assert!(columns.start.is_multiple_of(LANES), "a strip begins with a group");
        assert!(rows.len() <= Self::strip_rows(columns.len()), "a strip has few rows");
        self.strip = (rows, columns.start..padded(columns.end));
        self.outside.entries.clear();
    }

    /// The first captured-buffer index that was outside its axis since the machine was made.
    pub fn out_of_range(&self) -> Option<&OutOfRange> {
        self.out_of_range.as_ref()
    }

    /// A root over the strip that was run last.
    pub(super) fn root(&self, root: usize) -> Operand<'_> {
        let i = self.program.program().roots()[root].index();
        self.operand(&self.program.0, i, View::Strip(Scores::default()))
    }

    /// Number and width of the lines of a view.
    #[inline(always)]
    pub(super) fn extent(&self, view: View<'_>) -> (usize, usize) {
        match view {
            View::Rows { width } | View::Columns { width } | View::Diagonals { width } => {
                (1, width)
            }
            View::Strip(_) => (self.strip.0.len(), self.strip.1.len()),
        }
    }

    /// Node `i` as an operand of a step over `view`.
    #[inline(always)]
    pub(super) fn operand<'a>(
        &'a self,
        compiled: &Compiled,
        i: usize,
        view: View<'a>,
    ) -> Operand<'a> {
        let register = |register: usize| self.registers[register].get();
        let View::Strip(scores) = view else {
            let diagonal = matches!(view, View::Diagonals { .. });
            let expanded = compiled.expanded[i].filter(|_| diagonal);
            let data = match compiled.places[i] {
                Place::Head => {
                    return Operand { data: &self.values, start: i, step: 0, one: true };
                }
                Place::Row(own) | Place::Column(own) | Place::Diagonal(own) => {
                    register(expanded.unwrap_or(own))
                }
                Place::Full(_) | Place::Score => unreachable!("a rate reads what is rarer"),
            };
            return Operand { data, start: 0, step: 0, one: false };
        };
        let (rows, columns) = &self.strip;
        let (start, width) = (columns.start, columns.len() as isize);
        match compiled.places[i] {
            Place::Head => Operand { data: &self.values, start: i, step: 0, one: true },
            Place::Row(own) => {
                Operand { data: register(own), start: rows.start, step: 1, one: true }
            }
            Place::Column(own) => Operand { data: register(own), start, step: 0, one: false },
            Place::Diagonal(own) => {
                let start = self.q.len() - 1 - rows.start + start;
                Operand { data: register(own), start, step: -1, one: false }
            }
            Place::Full(own) => Operand { data: register(own), start: 0, step: width, one: false },
            Place::Score => {
                let step = scores.stride as isize;
                Operand { data: scores.data, start, step, one: false }
            }
        }
    }

    /// Row `r` and column `c` of the tile as a point.
    pub(super) fn point(&self, r: usize, c: usize) -> Point {
        self.head.at(self.q.start + r as i32, self.kv.start + c as i32)
    }
}
