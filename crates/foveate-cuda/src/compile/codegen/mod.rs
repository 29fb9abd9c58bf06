//! Mods as CUDA C++.
//!
//! A mask, a score, its derivative and dropout become a few device functions over one structure:
//!
//! ```text
//! struct Mods { addresses of captured buffers, their lengths, run-time scalars };
//! bool  fv_mask(mods, place, q, kv)
//! struct PlaceReads     what fv_score reads, and makes of it, that all entries of a head have in common
//! PlaceReads fv_place_reads(mods, place)
//! float fv_score(mods, place, q, kv, score, distance, reads)          distance: the float of q - kv
//! float fv_score_gradient(mods, place, q, kv, score, d, distance)         d · ∂score'/∂score
//! int   SCORE_INSTRUCTIONS, GRADIENT_INSTRUCTIONS                          about how many instructions they take
//! int   CAPTURE_READS                                             distinct reads of learned buffers, and
//! struct Capture<read>  kind     which scores read the same element
//!                       term()   d · ∂score'/∂element
//!                       plain    whether that is d
//!                       at()     the element that a score reads
//!                       add()    adds a sum of terms to an element's gradient
//!                       one()    whether a whole rectangle of scores reads one element
//! struct ScoreReads     only with SCORE_READS: what else fv_score reads, where that levels off
//!     bool fv_reads_one(mods, place, q0, q1, kv0, kv1)        each is one element in a rectangle
//!     ScoreReads fv_score_reads(mods, place, q, kv)
//!     float fv_score_given(mods, place, q, kv, score, distance, reads, given)    fv_score
//! bool  fv_dropout_keep(mods, place, q, kv)      float fv_dropout_scale(mods)
//! int   fv_cover(mods, place, q0, q1, kv0, kv1)              0 empty, 1 full, 2 undecided
//! ```
//!
//! All of them are there whatever the mods: without a mask `fv_mask` is true, and so on. `Place`
//! and the types that carry the meaning of the IR are in `kernels/mods.cuh`. The text depends on
//! the structure of the mods and on which indices are proven to be in range, not on what buffers
//! hold: [`ModsSource::pack`] puts addresses, lengths and scalars into the bytes of the structure.
//!
//! What decides (a mask, an index) is computed in `Exact` floats, rounded operation by operation
//! and with the elementary functions of `foveate_mods`, so every kernel and the CPU decide alike.
//! What ends up in a score is plain `float`, with the approximations of the special function
//! units where the operands are 16-bit ([`Options::fast_math`]).

mod captures;
mod print;
mod ranges;
mod sharing;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use foveate_mods::ir::BinaryOp;
use foveate_mods::{
    AnyBuffer, CaptureGradient, Leaf, MaskMod, Node, NodeId, OutOfRange, Program, ScoreGradient,
    ScoreMod, Type,
};
use foveate_problem::{Dims, Dropout};

use crate::compile::config::Config;
use crate::compile::params::Address;
use crate::error::CudaError;
pub use captures::{BufferAddresses, CaptureLayout, Field, FieldKind, buffer_bytes};
use captures::{Captures, Slots, Wanted};
use print::{Check, Over, Printed, Printer};
pub use ranges::range_table_bytes;
pub(crate) use ranges::range_table_params;
use sharing::{Shared, shared};
use steps::steps;
pub(crate) use steps::{mask_reads, mask_steps, score_steps};

/// The types that printed mods are made of: values, and ranges of them. Stands before
/// [`ModsSource::text`].
pub const PRELUDE: &str = concat!(
    include_str!("../../../kernels/mods.cuh"),
    "\n",
    include_str!("../../../kernels/ranges.cuh")
);

/// What is to be printed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mods<'a> {
    /// The mask.
    pub mask: Option<&'a MaskMod>,
    /// The score function.
    pub score: Option<&'a ScoreMod>,
    /// Its derivative; `None` for a forward alone.
    pub gradient: Option<&'a ScoreGradient>,
    /// Dropout.
    pub dropout: Option<&'a Dropout>,
}

/// Coordinates at which the functions are evaluated, each below its limit. Tiles overhang the
/// ends of a sequence and the functions are called there too, so `queries` and `keys` are
/// lengths rounded up to tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Queries of the longest sequence, rounded up to tiles.
    pub queries: usize,
    /// Keys of the longest sequence, rounded up to tiles.
    pub keys: usize,
}

/// How to print.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Where the functions are evaluated; decides which indices need no clamping.
    pub extent: Extent,
    /// Approximations with a relative error of about 2⁻²² (`tanh` 2⁻¹¹; `sin` and `cos` an absolute
    /// one of 2⁻²¹, of arguments up to 2²⁶) in scores and their derivatives: for 16-bit operands.
    pub fast_math: bool,
    /// Indices out of range are reported ([`FieldKind::Report`]) besides being clamped.
    pub checked: bool,
    /// Gradients of captured buffers are the same bits in every run.
    pub deterministic: bool,
}

/// Printed mods, the layout of `struct Mods`, and what goes into it.
#[derive(Clone, Debug)]
pub struct ModsSource {
    text: String,
    layout: CaptureLayout,
    captures: Captures,
    learned: BTreeSet<usize>,
    bounded: BTreeSet<usize>,
    dropout_scale: f32,
    has_derivative: bool,
}

impl Extent {
    /// Where kernels with tiles of `config` evaluate mods, on sequences of at most so many queries
    /// and keys.
    pub fn of(dims: &Dims, [queries, keys]: [usize; 2], config: &Config) -> Self {
        Self {
            batch: dims.batch,
            heads_q: dims.heads_q,
            heads_kv: dims.heads_kv,
            queries: queries.next_multiple_of(config.queries()),
            keys: keys.next_multiple_of(config.tile_kv),
        }
    }
}

impl ModsSource {
    /// What kernels are printed with that evaluate no mods.
    pub fn nothing() -> Self {
        let extent = Extent { batch: 1, heads_q: 1, heads_kv: 1, queries: 1, keys: 1 };
        let options = Options { extent, fast_math: false, checked: false, deterministic: false };
        Self::new(Mods::default(), &options).expect("without captures everything fits")
    }

    /// Prints `mods`.
    ///
    /// # Errors
    /// When the captures do not fit into the arguments of a kernel, or an axis of a captured
    /// buffer is longer than i32 indices reach.
    pub fn new(mods: Mods<'_>, options: &Options) -> Result<Self, CudaError> {
        let mut captures = Captures::default();
        let dropout_keep = mods.dropout.map(|d| d.keep_mask().program());
        let mask = mods.mask.map(|m| Part::new(m.program(), &mut captures, options));
        let score = mods.score.map(|s| Part::new(s.program(), &mut captures, options));
        let gradient = mods.gradient.map(|g| Part::new(g.program(), &mut captures, options));
        let dropout_keep = dropout_keep.map(|k| Part::new(k, &mut captures, options));

        let reads = mods.gradient.map_or(&[][..], ScoreGradient::captures);
        let buffer_of = |read: &CaptureGradient| {
            let gradient = gradient.as_ref().expect("reads come from a gradient");
            gradient.slots.buffers[read.buffer as usize]
        };
        let learned: BTreeSet<usize> = reads.iter().map(buffer_of).collect();
        let bounded: BTreeSet<usize> =
            mask.iter().flat_map(|mask| mask.slots.buffers.iter().copied()).collect();
        let wanted = Wanted {
            learned: learned.clone(),
            bounded: bounded.clone(),
            deterministic: options.deterministic,
            checked: options.checked,
            dropout: dropout_keep.is_some(),
        };
        let layout = CaptureLayout::new(&captures, &wanted)?;
        let context = Context { captures: &captures, layout: &layout, options };
        let text = [
            layout.print(&captures),
            context.outside(),
            context.mask(mods.mask, mask.as_ref()),
            context.cover(mask.as_ref()),
            context.each_bounded(&bounded),
            context.place_reads(score.as_ref()),
            context.score(mods.score, score.as_ref()),
            context.score_reads(score.as_ref().filter(|_| gradient.is_some())),
            context.score_gradient(gradient.as_ref()),
            context.lengths(score.as_ref(), gradient.as_ref()),
            context.capture_gradients(gradient.as_ref(), reads),
            context.dropout_keep(dropout_keep.as_ref()),
        ]
        .concat();
        let has_derivative =
            gradient.as_ref().is_some_and(|g| !is_one(g.program, g.program.roots()[0]));
        let dropout_scale = mods.dropout.map_or(1.0, Dropout::kept_scale);
        Ok(Self { text, layout, captures, learned, bounded, dropout_scale, has_derivative })
    }

    /// The structure and the functions. [`PRELUDE`] has to stand before.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The layout of `struct Mods`.
    pub fn layout(&self) -> &CaptureLayout {
        &self.layout
    }

    /// The captured buffers, by slot. [`buffer_bytes`] gives what to upload.
    pub fn buffers(&self) -> &[AnyBuffer] {
        &self.captures.buffers
    }

    /// Slots of the buffers that have gradients.
    pub fn learned(&self) -> impl Iterator<Item = usize> + '_ {
        self.learned.iter().copied()
    }

    /// Slots of the buffers that need a range table.
    pub fn bounded(&self) -> impl Iterator<Item = usize> + '_ {
        self.bounded.iter().copied()
    }

    /// Whether the derivative of the score by the score is anything but 1.
    pub fn has_derivative(&self) -> bool {
        self.has_derivative
    }

    /// What a report of an index out of range ([`FieldKind::Report`]) says; nothing when it is
    /// all 0, as it has to be before the first launch.
    pub fn out_of_range(&self, report: [i32; 4]) -> Option<OutOfRange> {
        if let [2, buffer, low, high] = report {
            let buffer = self.captures.buffers.get(buffer as usize)?.name().to_owned();
            let value = i64::from(high) << 32 | i64::from(low as u32);
            return Some(OutOfRange::Value { buffer, value });
        }
        let [1, buffer, axis, index] = report else { return None };
        let buffer = self.captures.buffers.get(buffer as usize)?;
        let shape = buffer.shape();
        // All axes of a buffer without elements have length 0 on the device.
        let (axis, index) = match shape.iter().position(|&len| len == 0) {
            Some(empty) if empty != axis as usize => (empty, 0),
            _ => (axis as usize, index),
        };
        let (buffer, len) = (buffer.name().to_owned(), *shape.get(axis)?);
        Some(OutOfRange::Index { buffer, axis, index, len })
    }

    /// The bytes of `struct Mods`: `addresses` of each slot of [`Self::buffers`], and where an
    /// index out of range is reported (0 unless checked).
    ///
    /// # Errors
    /// When an address that a field needs is 0, or the number of slots differs.
    pub fn pack(
        &self,
        addresses: &[BufferAddresses],
        report: Address,
    ) -> Result<Vec<u8>, CudaError> {
        self.layout.pack(&self.captures, self.dropout_scale, addresses, report)
    }
}

/// One program and what was found out about it.
struct Part<'a> {
    program: &'a Program,
    slots: Slots,
    within: Vec<Vec<bool>>,
    normal: Vec<bool>,
}

impl<'a> Part<'a> {
    fn new(program: &'a Program, captures: &mut Captures, options: &Options) -> Self {
        let slots = captures.add(program);
        // A buffer in device memory may have another length in the next call, so that one which is as long as
        // there are positions is no reason for another text.
        let more = usize::from(program.graph().buffers().iter().any(AnyBuffer::is_on_device));
        let Extent { queries, keys, .. } = options.extent;
        let extent = Extent { queries: queries + more, keys: keys + more, ..options.extent };
        let range = |leaf| extent.range(leaf);
        let (within, normal) = (program.indices_within(&range), program.positive_normals(&range));
        Self { program, slots, within, normal }
    }
}

impl Extent {
    /// Values of a coordinate.
    fn range(&self, leaf: Leaf) -> RangeInclusive<i32> {
        let to = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let below = |n: usize| 0..=to(n.saturating_sub(1));
        match leaf {
            Leaf::B => below(self.batch),
            Leaf::H => below(self.heads_q),
            Leaf::HKv => below(self.heads_kv),
            Leaf::Q => below(self.queries),
            Leaf::Kv => below(self.keys),
            Leaf::QLen => 0..=to(self.queries),
            Leaf::KvLen => 0..=to(self.keys),
            Leaf::Score => i32::MIN..=i32::MAX,
        }
    }
}

pub(crate) fn is_one(program: &Program, root: NodeId) -> bool {
    *program.graph().node(root) == Node::F32(1f32.to_bits())
}

/// The nodes that `roots` depend on, and they.
fn needed(program: &Program, roots: &[NodeId]) -> Vec<bool> {
    let nodes = program.graph().nodes();
    let mut needed = vec![false; nodes.len()];
    roots.iter().for_each(|root| needed[root.index()] = true);
    for (i, node) in nodes.iter().enumerate().rev() {
        if needed[i] {
            node.for_each_operand(|x| needed[x.index()] = true);
        }
    }
    needed
}

/// Whether a node that `roots` depend on is such.
fn any_needed(program: &Program, roots: &[NodeId], such: impl Fn(&Node) -> bool) -> bool {
    let needed = needed(program, roots);
    program.graph().nodes().iter().zip(needed).any(|(node, needed)| needed && such(node))
}

/// Whether `roots` depend on what a captured buffer holds.
fn loads(program: &Program, roots: &[NodeId]) -> bool {
    any_needed(program, roots, |node| matches!(node, Node::Load { .. }))
}

/// Reads of root 0 whose indices vary with the query or key alone and level off: those of a relative
/// bias beyond its largest distance, and T5's buckets.
fn levelling_reads(program: &Program, decides: &[bool]) -> Vec<(NodeId, Vec<NodeId>)> {
    let (graph, depends) = (program.graph(), program.depends());
    let levels = |node: &Node| {
        matches!(node, Node::Binary(BinaryOp::Min | BinaryOp::Max, ..) | Node::Select { .. })
    };
    let needed = needed(program, &program.roots()[..1]);
    let mut reads = Vec::new();
    for id in graph.ids() {
        let Node::Load { index, .. } = graph.node(id) else { continue };
        let by_score = depends[id.index()].contains(Leaf::Score);
        let value = graph.ty(id) == Type::F32 && !decides[id.index()] && !by_score;
        let varies = |id: &&NodeId| {
            let leaves = depends[id.index()];
            leaves.contains(Leaf::Q) || leaves.contains(Leaf::Kv)
        };
        let index: Vec<NodeId> = index.iter().filter(varies).copied().collect();
        let all_level = index.iter().all(|id| any_needed(program, &[*id], levels));
        if needed[id.index()] && value && !index.is_empty() && all_level && !loads(program, &index)
        {
            reads.push((id, index));
        }
    }
    reads
}

/// The largest parts of root 0 that read a captured buffer and are the same for all entries of a head,
/// as a slope of ALiBi is.
fn place_reads(program: &Program, decides: &[bool]) -> Vec<NodeId> {
    let (graph, depends) = (program.graph(), program.depends());
    let root = &program.roots()[..1];
    let of_place = |id: NodeId| {
        let by_entry =
            [Leaf::Q, Leaf::Kv, Leaf::Score].iter().any(|&leaf| depends[id.index()].contains(leaf));
        graph.ty(id) == Type::F32 && !decides[id.index()] && !by_entry && loads(program, &[id])
    };
    let needed = needed(program, root);
    let mut reads: BTreeSet<NodeId> = root.iter().copied().filter(|&id| of_place(id)).collect();
    for id in graph.ids().filter(|id| needed[id.index()] && !of_place(*id)) {
        graph.node(id).for_each_operand(|x| {
            reads.extend(Some(x).filter(|&x| of_place(x)));
        });
    }
    reads.into_iter().collect()
}

/// Instructions that the index of a learned buffer may take and still be copied to each of the
/// dozen or so places where a tile adds to the gradient. A relative bias takes less than ten, and a
/// call would cost as much; T5's buckets take about sixty, and their copies half a second of
/// compilation.
const INLINE: usize = 32;

const ENTRY: &str = "const Mods& mods, const Place& place, Int q, Int kv";

/// Of `fv_score`; `distance` is the float of `q - kv`.
const SCORE_ENTRY: &str = "const Mods& mods, const Place& place, Int q, Int kv, float score, \
                           float distance, const PlaceReads& reads";

/// Names of the fields of a structure, one for each of `nodes`, and the statements that return it.
fn fields(printer: &Printer<'_>, nodes: &[NodeId]) -> (Vec<String>, Vec<String>) {
    let Printed { mut statements, roots } = printer.print(nodes);
    let values: Vec<String> = roots.into_iter().map(|root| root.text).collect();
    statements.push(format!("return {{{}}};", values.join(", ")));
    ((0..nodes.len()).map(|i| format!("x{i}")).collect(), statements)
}

/// A function: what it says in the text form of mods, its head, its statements.
fn function(says: &str, head: &str, statements: &[String]) -> String {
    let mut text = String::from("\n");
    if !says.is_empty() {
        text.push_str(&format!("// {says}\n"));
    }
    text.push_str(&format!("__device__ {head} {{\n"));
    statements.iter().for_each(|line| text.push_str(&format!("    {line}\n")));
    text + "}\n"
}

struct Context<'a> {
    captures: &'a Captures,
    layout: &'a CaptureLayout,
    options: &'a Options,
}

impl Context<'_> {
    fn printer<'b>(&'b self, part: &'b Part<'_>, check: Check) -> Printer<'b> {
        Printer {
            program: part.program,
            slots: &part.slots,
            captures: self.captures,
            layout: self.layout,
            within: &part.within,
            normal: &part.normal,
            over: Over::Entry,
            given: &[],
            has_distance: false,
            fast_math: self.options.fast_math,
            check: if self.options.checked { check } else { Check::Off },
        }
    }

    /// The same for a function that is given `distance`, the float of `q - kv`. Floats hold all
    /// integers up to 2²⁴, so that below it a sum of parts of a distance is the converted distance.
    fn score_printer<'b>(&'b self, part: &'b Part<'_>, check: Check) -> Printer<'b> {
        let Extent { queries, keys, .. } = self.options.extent;
        let has_distance = queries.max(keys) <= 1 << f32::MANTISSA_DIGITS;
        Printer { has_distance, ..self.printer(part, check) }
    }

    /// The function that root 0 of a program is.
    fn whole(printer: &Printer<'_>, says: &str, head: &str) -> String {
        let Printed { mut statements, roots } = printer.print(&printer.program.roots()[..1]);
        statements.push(format!("return {};", roots[0].text));
        function(says, head, &statements)
    }

    /// Reports an index of a captured buffer that is outside its axis.
    fn outside(&self) -> String {
        if !self.options.checked {
            return String::new();
        }
        let report = self.layout.name(FieldKind::Report);
        let head = format!(
            "bool fv_mask({ENTRY});\n__device__ void fv_outside({ENTRY}, bool visible, int buffer, int axis, Int index)"
        );
        let statements = [
            "if (!(q < place.q_len) || !(kv < place.kv_len)) return;".to_owned(),
            "if (visible && !fv_mask(mods, place, q, kv)) return;".to_owned(),
            format!("report_index(mods.{report}, buffer, axis, index.v);"),
        ];
        let says = "An index counts at entries that are there and, in scores, visible.";
        let outside = function(says, &head, &statements);
        let [there, visible, _] = statements;
        let wide = format!("report_value(mods.{report}, buffer, __ldg(at));");
        let head = format!("void fv_too_wide({ENTRY}, bool visible, int buffer, const i64* at)");
        outside + &function("So does an element.", &head, &[there, visible, wide])
    }

    fn mask(&self, mask: Option<&MaskMod>, part: Option<&Part<'_>>) -> String {
        let head = format!("bool fv_mask({ENTRY})");
        match (mask, part) {
            (Some(mask), Some(part)) => {
                Self::whole(&self.printer(part, Check::Everywhere), &mask.to_string(), &head)
            }
            _ => function("No mask.", &head, &["return true;".into()]),
        }
    }

    fn cover(&self, part: Option<&Part<'_>>) -> String {
        let head =
            "int fv_cover(const Mods& mods, const Place& place, int q0, int q1, int kv0, int kv1)";
        let says =
            "fv_mask over queries q0 .. q1 and keys kv0 .. kv1: 0 never, 1 always, 2 undecided.";
        let Some(part) = part else {
            return function(says, head, &["return 1;".into()]);
        };
        let printer = Printer { over: Over::Rectangle, ..self.printer(part, Check::Off) };
        let printed = printer.print(part.program.roots());
        let mut statements = vec![
            "const IntRange q(q0, q1 - 1), kv(kv0, kv1 - 1);".to_owned(),
            "bool within = true;".to_owned(),
        ];
        statements.extend(printed.statements);
        statements.push(format!("const BoolRange mask = {};", printed.roots[0].text));
        statements.push("return cover(mask, within);".to_owned());
        function(says, head, &statements)
    }

    /// The captured buffers whose ranges `fv_cover` reads: elements, range tables and axes.
    fn each_bounded(&self, slots: &BTreeSet<usize>) -> String {
        let field = |kind| format!("mods.{}", self.layout.name(kind));
        let statement = |&slot: &usize| {
            let axes: Vec<String> = (0..self.captures.buffers[slot].shape().len())
                .map(|axis| {
                    let length = field(FieldKind::Length { buffer: slot, axis });
                    match self.captures.buffers[slot].is_dense() {
                        true => format!("{{IntRange(0), {length}}}"),
                        false => {
                            let stride = field(FieldKind::Stride { buffer: slot, axis });
                            format!("{{IntRange(0), {length}, {stride}}}")
                        }
                    }
                })
                .collect();
            let [elems, table] = [FieldKind::Buffer(slot), FieldKind::Ranges(slot)].map(field);
            format!("f({elems}, {table}, {{{}}});", axes.join(", "))
        };
        let statements: Vec<String> = slots.iter().map(statement).collect();
        let head =
            "void for_each_bounded([[maybe_unused]] const Mods& mods, [[maybe_unused]] const F& f)";
        let says = "Calls f with the buffers whose ranges fv_cover reads, their tables and axes.";
        function(says, head, &statements).replacen(
            "__device__",
            "template <typename F>\n__device__",
            1,
        )
    }

    fn score(&self, score: Option<&ScoreMod>, part: Option<&Part<'_>>) -> String {
        let head = format!("float fv_score({SCORE_ENTRY})");
        match (score, part) {
            (Some(score), Some(part)) => {
                let given = self.of_place(part);
                let printer = self.score_printer(part, Check::WhereVisible);
                let printer = Printer { given: &given, ..printer };
                Self::whole(&printer, &score.to_string(), &head)
            }
            _ => function("No score function.", &head, &["return score;".into()]),
        }
    }

    /// What `fv_score` is given of [`place_reads`]; indices that are checked are checked for every entry.
    fn of_place(&self, part: &Part<'_>) -> Vec<(NodeId, String)> {
        let printer = self.printer(part, Check::Off);
        let decides = printer.decides(&part.program.roots()[..1]);
        let reads = if self.options.checked { vec![] } else { place_reads(part.program, &decides) };
        reads.into_iter().enumerate().map(|(i, id)| (id, format!("reads.x{i}"))).collect()
    }

    fn place_reads(&self, part: Option<&Part<'_>>) -> String {
        let head = "PlaceReads fv_place_reads(const Mods& mods, const Place& place)";
        let given = part.map(|part| (part, self.of_place(part))).filter(|(_, of)| !of.is_empty());
        let Some((part, given)) = given else {
            return "\nstruct PlaceReads {};\n".to_owned()
                + &function("No reads of a head.", head, &["return {};".into()]);
        };
        let nodes: Vec<NodeId> = given.into_iter().map(|(id, _)| id).collect();
        let (fields, reads) = fields(&self.printer(part, Check::Off), &nodes);
        format!("\nstruct PlaceReads {{ float {}; }};\n", fields.join(", "))
            + &function("What fv_score reads of a head.", head, &reads)
    }

    /// What the score reads where its indices level off: tiles far from the diagonal read one
    /// element each, and need neither its index nor the read for every score. Indices that are
    /// checked are computed for every score.
    fn score_reads(&self, part: Option<&Part<'_>>) -> String {
        let Some(part) = part.filter(|_| !self.options.checked) else { return String::new() };
        let (program, printer) = (part.program, self.printer(part, Check::Off));
        let root = &program.roots()[..1];
        let (level, index): (Vec<NodeId>, Vec<Vec<NodeId>>) =
            levelling_reads(program, &printer.decides(root)).into_iter().unzip();
        if level.is_empty() {
            return String::new();
        }
        let index = index.concat();
        let place = self.place(program, &index);
        let (fields, reads) = fields(&printer, &level);
        let mut given = self.of_place(part);
        given.extend(level.into_iter().zip(fields.iter().map(|field| format!("given.{field}"))));
        let printer = Printer { given: &given, ..self.score_printer(part, Check::Off) };
        let Printed { mut statements, roots } = printer.print(root);
        statements.push(format!("return {};", roots[0].text));
        [
            format!(
                "\n#define SCORE_READS 1\nstruct ScoreReads {{ float {}; }};\n",
                fields.join(", ")
            ),
            function(
                "Whether fv_score reads the same all over a rectangle.",
                &format!(
                    "{place}bool fv_reads_one(const Mods& mods, const Place& place, \
                     int q0, int q1, int kv0, int kv1)"
                ),
                &self.reads_one(part, &index),
            ),
            function("", &format!("{place}ScoreReads fv_score_reads({ENTRY})"), &reads),
            function(
                "fv_score, given what it reads.",
                &format!("float fv_score_given({SCORE_ENTRY}, ScoreReads given)"),
                &statements,
            ),
        ]
        .concat()
    }

    fn score_gradient(&self, gradient: Option<&Part<'_>>) -> String {
        let head =
            format!("float fv_score_gradient({ENTRY}, float score, float d, float distance)");
        let says = "d times the derivative of fv_score by the score.";
        let Some(part) = gradient.filter(|g| !is_one(g.program, g.program.roots()[0])) else {
            return function(says, &head, &["return d;".into()]);
        };
        let printed = self.score_printer(part, Check::Off).print(&part.program.roots()[..1]);
        let mut statements = printed.statements;
        statements.push(format!("return d * {};", printed.roots[0].factor()));
        function(says, &head, &statements)
    }

    /// Where a function stands that computes an index.
    fn place(&self, program: &Program, index: &[NodeId]) -> &'static str {
        let long = steps(program, index, self.options.fast_math) > INLINE;
        if long { "OUT_OF_LINE " } else { "" }
    }

    /// How long the copies of a score are, of which a kernel has one for each score of a lane unless
    /// it makes a loop of them.
    fn lengths(&self, score: Option<&Part<'_>>, gradient: Option<&Part<'_>>) -> String {
        let of = |part: &Part<'_>, root: usize| {
            steps(part.program, &part.program.roots()[root..=root], self.options.fast_math)
        };
        let score = score.map_or(0, |part| of(part, 0));
        let gradient = score + gradient.map_or(0, |part| of(part, 0));
        format!(
            "\n// Instructions of fv_score, and of it and its derivative, about.\n\
             [[maybe_unused]] constexpr int SCORE_INSTRUCTIONS = {score}, GRADIENT_INSTRUCTIONS = {gradient};\n"
        )
    }

    fn capture_gradients(&self, gradient: Option<&Part<'_>>, reads: &[CaptureGradient]) -> String {
        let mut text = format!(
            "\n// Distinct reads of learned buffers.\n[[maybe_unused]] constexpr int CAPTURE_READS = {};\n\
             template <int READ>\nstruct Capture;\n",
            reads.len()
        );
        let Some(part) = gradient else { return text };
        let roots = part.program.roots();
        let printer = self.printer(part, Check::Off);
        for (number, read) in reads.iter().enumerate() {
            let slot = part.slots.buffers[read.buffer as usize];
            let index: Vec<NodeId> = read.index.iter().map(|&root| roots[root]).collect();
            let sharing = shared(part.program, &index);
            let kind = sharing.name();

            let Printed { statements: mut term, roots: value } =
                printer.print(&roots[read.value..=read.value]);
            let plain = is_one(part.program, roots[read.value]);
            term.push(if plain {
                "return d;".to_owned()
            } else {
                format!("return d * {};", value[0].factor())
            });
            let Printed { statements: mut at, roots: pieces } = printer.print(&index);
            let position = printer.row_major(slot, (&index, read.from_end), None, &pieces);
            at.push(format!("return {};", position.strip_prefix(" + ").unwrap_or("0")));
            let target = self.layout.name(FieldKind::Gradient(slot));
            let add = if self.options.deterministic {
                let sums = self.layout.name(FieldKind::Sums(slot));
                format!("add_exactly(mods.{sums} + at * 3, mods.{target} + at, sum);")
            } else {
                format!("atomicAdd(mods.{target} + at, sum);")
            };

            let method = |head: &str, statements: &[String]| {
                let body: String = statements.iter().map(|s| format!("        {s}\n")).collect();
                format!("    static __device__ {head} {{\n{body}    }}\n")
            };
            // The name in the structure: a buffer's own may be any string.
            let name = self.layout.name(FieldKind::Buffer(slot));
            text.push_str(&format!(
                "\n// What scores give to `{name}`.\ntemplate <> struct Capture<{number}> {{\n"
            ));
            text.push_str(&format!(
                "    static constexpr CaptureKind kind = {kind};\n    static constexpr bool plain = {plain};\n"
            ));
            text.push_str(&method(&format!("float term({ENTRY}, float score, float d)"), &term));
            let place = self.place(part.program, &index);
            // Only an element that no two scores are known to share may depend on the score.
            let score = if sharing == Shared::Nowhere { ", float score" } else { "" };
            text.push_str(&method(&format!("{place}i64 at({ENTRY}{score})"), &at));
            text.push_str(&method("void add(const Mods& mods, i64 at, float sum)", &[add]));
            if sharing == Shared::Diagonal {
                let head = format!(
                    "{place}bool one(const Mods& mods, const Place& place, \
                     int q0, int q1, int kv0, int kv1)"
                );
                text.push_str(&method(&head, &self.reads_one(part, &index)));
            }
            text.push_str("};\n");
        }
        text
    }

    /// Whether indices are one number each over a rectangle: far from the diagonal those of a
    /// relative bias are, and the whole of a tile goes to one element.
    fn reads_one(&self, part: &Part<'_>, index: &[NodeId]) -> Vec<String> {
        let depends = part.program.depends();
        let varies = |id: &NodeId| {
            let leaves = depends[id.index()];
            leaves.contains(Leaf::Q) || leaves.contains(Leaf::Kv)
        };
        let index: Vec<NodeId> = index.iter().copied().filter(varies).collect();
        // Only the buffers of masks have range tables.
        if loads(part.program, &index) {
            return vec!["return false;".to_owned()];
        }
        let printer = Printer { over: Over::Rectangle, ..self.printer(part, Check::Off) };
        let Printed { mut statements, roots } = printer.print(&index);
        statements.insert(0, "const IntRange q(q0, q1 - 1), kv(kv0, kv1 - 1);".to_owned());
        let known: Vec<String> =
            roots.iter().map(|root| format!("IntRange({}).known()", root.text)).collect();
        statements.push(format!("return {};", known.join(" && ")));
        statements
    }

    fn dropout_keep(&self, part: Option<&Part<'_>>) -> String {
        let head = format!("bool fv_dropout_keep({ENTRY})");
        let scale = "float fv_dropout_scale(const Mods& mods)";
        let Some(part) = part else {
            return function("No dropout.", &head, &["return true;".into()])
                + &function("", scale, &["return 1.f;".into()]);
        };
        let says = format!("Dropout keeps {}", part.program.text().0);
        let field = self.layout.name(FieldKind::KeepScale);
        Self::whole(&self.printer(part, Check::WhereVisible), &says, &head)
            + &function("", scale, &[format!("return mods.{field};")])
    }
}
