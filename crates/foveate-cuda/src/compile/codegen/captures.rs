//! What mods capture, gathered from several programs: `struct Mods` as data.

use std::collections::BTreeSet;

use foveate_mods::ir::BinaryOp;
use foveate_mods::{AnyBuffer, ElementType, Node, Program, Scalar, ScalarValue, Type};

use crate::compile::params::{Address, MODS_BYTES};
use crate::error::CudaError;

/// Where the captures of one program stand among those of all.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub buffers: Vec<usize>,
    pub scalars: Vec<usize>,
}

/// The captured buffers and scalars of all programs, each once.
#[derive(Clone, Debug, Default)]
pub(super) struct Captures {
    pub buffers: Vec<AnyBuffer>,
    pub scalars: Vec<Scalar>,
    /// Scalars by which integers are divided.
    pub divisors: BTreeSet<usize>,
}

impl Captures {
    /// Adds those of `program`. The same buffer, and a scalar of the same name and value, is one.
    pub fn add(&mut self, program: &Program) -> Slots {
        let graph = program.graph();
        let buffers = graph.buffers().iter().map(|buffer| {
            let found = self.buffers.iter().position(|b| b.same(buffer));
            found.unwrap_or_else(|| {
                self.buffers.push(buffer.clone());
                self.buffers.len() - 1
            })
        });
        let buffers = buffers.collect();
        let scalars = graph.scalars().iter().map(|scalar| {
            let found = self.scalars.iter().position(|s| s == scalar);
            found.unwrap_or_else(|| {
                self.scalars.push(scalar.clone());
                self.scalars.len() - 1
            })
        });
        let scalars: Vec<usize> = scalars.collect();
        for node in graph.nodes() {
            if let Node::Binary(BinaryOp::Div | BinaryOp::Rem, _, by) = node
                && let Node::Scalar(slot) = *graph.node(*by)
                && graph.scalars()[slot as usize].ty() == Type::I32
            {
                self.divisors.insert(scalars[slot as usize]);
            }
        }
        Slots { buffers, scalars }
    }
}

/// What a field of `struct Mods` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// Address of a captured buffer's element of index 0, of its type in memory.
    Buffer(usize),
    /// Distance of neighbours along an axis of a captured buffer that is not row-major, in elements,
    /// i64.
    Stride {
        /// The buffer.
        buffer: usize,
        /// The axis.
        axis: usize,
    },
    /// Address of a learned buffer's gradient, f32.
    Gradient(usize),
    /// Address of the integer sums of a learned buffer's gradient (deterministic only), i64
    /// `[elements, 3]`.
    Sums(usize),
    /// Address of a captured buffer's range table ([`super::range_table_bytes`]), or its place in the
    /// shared memory of a kernel that makes it.
    Ranges(usize),
    /// Address of the report of an index out of range (checked only), i32 `[4]`.
    Report,
    /// Length of an axis of a captured buffer, i32.
    Length {
        /// The buffer.
        buffer: usize,
        /// The axis.
        axis: usize,
    },
    /// A run-time scalar, 4 bytes.
    Scalar(usize),
    /// The same as what integers are divided by: the divisor without its sign, and numbers that a
    /// quotient is made of without a division; six of 32 bits.
    Divisor(usize),
    /// Factor on probabilities that dropout keeps, f32.
    KeepScale,
    /// Nothing: a structure has at least one field.
    Nothing,
}

/// One field of `struct Mods`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in the printed structure.
    pub name: String,
    /// What it holds.
    pub kind: FieldKind,
    /// Its place, in bytes from the start.
    pub offset: usize,
}

impl FieldKind {
    /// Size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Buffer(_)
            | Self::Stride { .. }
            | Self::Gradient(_)
            | Self::Sums(_)
            | Self::Ranges(_)
            | Self::Report => 8,
            Self::Divisor(_) => 24,
            Self::Length { .. } | Self::Scalar(_) | Self::KeepScale | Self::Nothing => 4,
        }
    }

    /// Alignment in bytes.
    fn alignment(self) -> usize {
        if self.bytes() == 8 { 8 } else { 4 }
    }
}

/// `struct Divisor` of `mods.cuh`: a divisor `d`, and what the quotient of `n < 2^31` by `m = |d|` is made of without
/// a division: with `s` = ceil(log2 m) it is `n * factor >> 31 + s`, since `factor = ceil(2^(31 + s) / m)` exceeds the
/// exact one by less than 1 (Granlund and Montgomery, Division by invariant integers using multiplication, PLDI 1994,
/// theorem 4.2 with numbers of 31 bits). The kernel takes the upper 32 bits of the product, so the shift is less by 32,
/// and m = 1 has `unit`, all ones, in place of a factor.
fn divisor(d: i32) -> Vec<u8> {
    let m = d.unsigned_abs();
    let shift = m.next_power_of_two().trailing_zeros();
    let [factor, unit, shift] = match m {
        0 => [0; 3],
        1 => [0, u32::MAX, 0],
        _ => [((1u64 << (31 + shift)).div_ceil(u64::from(m))) as u32, 0, shift - 1],
    };
    let all_ones = |set: bool| if set { u32::MAX } else { 0 };
    let words = [m, factor, unit, shift, all_ones(m != 0), all_ones(d < 0)];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Device addresses of one captured buffer. What a [`FieldKind`] does not ask for may be 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferAddresses {
    /// The element of index 0; the others where the buffer's strides say, of its type in memory. A
    /// buffer without elements needs 8 bytes of zeros, which are what reads of it give.
    pub elems: Address,
    /// The gradient, f32 in the order of the elements. It is added to.
    pub gradient: Address,
    /// Integer sums of the gradient, i64 `[elements, 3]`, all 0 before the backward, which
    /// `fv_capture_sums` adds to the gradient after it.
    pub sums: Address,
    /// The range table; see [`super::range_table_bytes`]. Where the kernel makes it for itself, its
    /// place in shared memory, in bytes; 0 where no bounds read it.
    pub ranges: Address,
}

/// `struct Mods`: its fields in order, with natural alignment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureLayout {
    fields: Vec<Field>,
    bytes: usize,
}

/// What the layout takes in, beside the captures.
pub(super) struct Wanted {
    /// Slots of buffers whose gradients are wanted.
    pub learned: BTreeSet<usize>,
    /// Slots of buffers that bounds read.
    pub bounded: BTreeSet<usize>,
    pub deterministic: bool,
    pub checked: bool,
    pub dropout: bool,
}

impl CaptureLayout {
    pub(super) fn new(captures: &Captures, wanted: &Wanted) -> Result<Self, CudaError> {
        let mut names = Names::default();
        let mut stems = Vec::new();
        let mut fields: Vec<(String, FieldKind)> = Vec::new();
        for (slot, buffer) in captures.buffers.iter().enumerate() {
            let stem = names.fresh(buffer.name());
            fields.push((stem.clone(), FieldKind::Buffer(slot)));
            stems.push(stem);
        }
        let mut scalars = Vec::new();
        for (i, scalar) in captures.scalars.iter().enumerate() {
            let name = names.fresh(&scalar.name);
            if captures.divisors.contains(&i) {
                scalars.push((names.fresh(&format!("{name}_divisor")), FieldKind::Divisor(i)));
            }
            scalars.push((name, FieldKind::Scalar(i)));
        }
        for (slot, stem) in stems.iter().enumerate() {
            let mut more = |suffix: &str, kind| {
                fields.push((names.fresh(&format!("{stem}_{suffix}")), kind));
            };
            let buffer = &captures.buffers[slot];
            if !buffer.is_dense() {
                for axis in 0..buffer.shape().len() {
                    more(&format!("stride_{axis}"), FieldKind::Stride { buffer: slot, axis });
                }
            }
            if wanted.bounded.contains(&slot) {
                more("ranges", FieldKind::Ranges(slot));
            }
            if wanted.learned.contains(&slot) {
                more("gradient", FieldKind::Gradient(slot));
                if wanted.deterministic {
                    more("sums", FieldKind::Sums(slot));
                }
            }
        }
        if wanted.checked {
            fields.push((names.fresh("report"), FieldKind::Report));
        }
        fields.sort_by_key(|(_, kind)| match kind {
            FieldKind::Buffer(slot)
            | FieldKind::Stride { buffer: slot, .. }
            | FieldKind::Ranges(slot)
            | FieldKind::Gradient(slot)
            | FieldKind::Sums(slot) => *slot,
            _ => usize::MAX,
        });
        for (buffer, stem) in stems.iter().enumerate() {
            for axis in 0..captures.buffers[buffer].shape().len() {
                let name = names.fresh(&format!("{stem}_{axis}"));
                fields.push((name, FieldKind::Length { buffer, axis }));
            }
        }
        fields.extend(scalars);
        if wanted.dropout {
            fields.push((names.fresh("dropout_scale"), FieldKind::KeepScale));
        }
        if fields.is_empty() {
            fields.push((names.fresh("nothing"), FieldKind::Nothing));
        }
        let mut bytes = 0;
        let fields: Vec<Field> = fields
            .into_iter()
            .map(|(name, kind)| {
                let offset = bytes;
                bytes += kind.bytes();
                Field { name, kind, offset }
            })
            .collect();
        // Addresses come first, so only the end needs padding.
        let widest = fields[0].kind.alignment();
        let bytes = bytes.next_multiple_of(widest);
        if bytes > MODS_BYTES {
            return Err(CudaError::argument(format!(
                "the mods capture {} buffers and {} scalars, {bytes} bytes of arguments; a kernel \
                 takes {MODS_BYTES} of them: join buffers into one",
                captures.buffers.len(),
                captures.scalars.len()
            )));
        }
        for buffer in &captures.buffers {
            if let Some(len) = buffer.shape().iter().find(|&&n| n > i32::MAX as usize) {
                return Err(CudaError::argument(format!(
                    "captured buffer `{}` has an axis of length {len}; indices are i32, up to {}",
                    buffer.name(),
                    i32::MAX
                )));
            }
        }
        Ok(Self { fields, bytes })
    }

    /// The fields, in order.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Size of the structure.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Name of the field that holds `kind`.
    pub(super) fn name(&self, kind: FieldKind) -> &str {
        let found = self.fields.iter().find(|f| f.kind == kind);
        &found.expect("every capture that is printed has its field").name
    }

    /// The structure in C++.
    pub(super) fn print(&self, captures: &Captures) -> String {
        let mut text = String::from("struct Mods {\n");
        for field in &self.fields {
            let of = |slot: usize| match captures.buffers[slot].element() {
                ElementType::Bool => "const unsigned char*",
                ElementType::U8 => "const U8*",
                ElementType::I8 => "const signed char*",
                ElementType::I16 => "const short*",
                ElementType::I32 => "const int*",
                ElementType::I64 => "const i64*",
                ElementType::F16 => "const F16*",
                ElementType::BF16 => "const BF16*",
                ElementType::F32 => "const float*",
                ElementType::F64 => "const double*",
            };
            let ends = |slot: usize| match captures.buffers[slot].ty() {
                Type::Bool => "const BoolEnds*",
                Type::I32 => "const IntEnds*",
                Type::F32 => "const FloatEnds*",
            };
            let ty = match field.kind {
                FieldKind::Buffer(slot) => of(slot),
                FieldKind::Stride { .. } => "i64",
                FieldKind::Gradient(_) => "float*",
                FieldKind::Sums(_) => "i64*",
                FieldKind::Ranges(slot) => ends(slot),
                FieldKind::Report => "int*",
                FieldKind::Length { .. } | FieldKind::Nothing => "int",
                FieldKind::Scalar(i) => match captures.scalars[i].ty() {
                    Type::Bool | Type::I32 => "Int",
                    Type::F32 => "float",
                },
                FieldKind::Divisor(_) => "Divisor",
                FieldKind::KeepScale => "float",
            };
            let note = match field.kind {
                FieldKind::Buffer(slot) => {
                    let buffer = &captures.buffers[slot];
                    let lengths: Vec<&str> = (0..buffer.shape().len())
                        .map(|axis| self.name(FieldKind::Length { buffer: slot, axis }))
                        .collect();
                    format!("  // [{}]", lengths.join(", "))
                }
                FieldKind::Nothing => "  // the mods capture nothing".to_owned(),
                _ => String::new(),
            };
            text.push_str(&format!("    {ty} {};{note}\n", field.name));
        }
        text + "};\n"
    }

    pub(super) fn pack(
        &self,
        captures: &Captures,
        dropout_scale: f32,
        addresses: &[BufferAddresses],
        report: Address,
    ) -> Result<Vec<u8>, CudaError> {
        if addresses.len() != captures.buffers.len() {
            return Err(CudaError::argument(format!(
                "the mods capture {} buffers, but addresses of {} were given",
                captures.buffers.len(),
                addresses.len()
            )));
        }
        let mut bytes = vec![0; self.bytes];
        for field in &self.fields {
            let address = |what: &str, of: &str, address: Address| match address {
                0 => Err(CudaError::argument(format!("no device address for the {what} of {of}"))),
                address => Ok(address.to_le_bytes().to_vec()),
            };
            let name = |slot: usize| format!("captured buffer `{}`", captures.buffers[slot].name());
            let value = match field.kind {
                FieldKind::Buffer(slot) => address("elements", &name(slot), addresses[slot].elems)?,
                FieldKind::Stride { buffer, axis } => {
                    (captures.buffers[buffer].strides()[axis] as i64).to_le_bytes().to_vec()
                }
                FieldKind::Gradient(slot) => {
                    address("gradient", &name(slot), addresses[slot].gradient)?
                }
                FieldKind::Sums(slot) => {
                    address("integer sums", &name(slot), addresses[slot].sums)?
                }
                FieldKind::Ranges(slot) => addresses[slot].ranges.to_le_bytes().to_vec(),
                FieldKind::Report => address("report", "indices out of range", report)?,
                FieldKind::Length { buffer, axis } => {
                    let buffer = &captures.buffers[buffer];
                    // Without elements every index is clamped to 0.
                    let empty = buffer.elems() == 0;
                    let length = if empty { 0 } else { buffer.shape()[axis] as i32 };
                    length.to_le_bytes().to_vec()
                }
                FieldKind::Scalar(i) => match captures.scalars[i].value {
                    ScalarValue::Bool(v) => i32::from(v).to_le_bytes().to_vec(),
                    ScalarValue::I32(v) => v.to_le_bytes().to_vec(),
                    ScalarValue::F32(v) => v.to_le_bytes().to_vec(),
                },
                FieldKind::Divisor(i) => match captures.scalars[i].value {
                    ScalarValue::I32(v) => divisor(v),
                    ScalarValue::Bool(_) | ScalarValue::F32(_) => {
                        unreachable!("integers are divided by integers")
                    }
                },
                FieldKind::KeepScale => dropout_scale.to_le_bytes().to_vec(),
                FieldKind::Nothing => vec![0; 4],
            };
            bytes[field.offset..field.offset + value.len()].copy_from_slice(&value);
        }
        Ok(bytes)
    }
}

/// The memory of a captured buffer of the host from its element of index 0 on, as the device reads
/// it; zeros for a buffer without elements.
pub fn buffer_bytes(buffer: &AnyBuffer) -> Vec<u8> {
    let offset = buffer.offset();
    match buffer.span() {
        0 => vec![0; 8],
        span => buffer.elements().bytes(offset..offset + span).to_vec(),
    }
}

/// Names that are legal in C++ and differ.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeSet<String>);

impl Names {
    /// `wanted` where that can be, something near it otherwise. Names without a small letter
    /// are made small: macros have such names.
    pub fn fresh(&mut self, wanted: &str) -> String {
        let legal = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let mut stem: String = wanted.chars().map(legal).collect();
        if !stem.contains(|c: char| c.is_ascii_lowercase()) {
            stem.make_ascii_lowercase();
        }
        if !stem.starts_with(|c: char| c.is_ascii_alphabetic()) {
            stem.insert(0, 'x');
        }
        if RESERVED.split(' ').any(|word| word == stem) {
            stem.push('_');
        }
        let mut name = stem.clone();
        let mut n = 2;
        while !self.0.insert(name.clone()) {
            name = format!("{stem}_{n}");
            n += 1;
        }
        name
    }
}

/// Words of C++17 that cannot name a field.
const RESERVED: &str = "\
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl \
    concept const const_cast constexpr continue decltype default delete do double \
    dynamic_cast else enum explicit export extern false float for friend goto if inline int \
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private \
    protected public register reinterpret_cast requires return short signed sizeof static \
    static_assert static_cast struct switch template this thread_local throw true try \
    typedef typeid typename union unsigned using virtual void volatile wchar_t while xor \
    xor_eq";
