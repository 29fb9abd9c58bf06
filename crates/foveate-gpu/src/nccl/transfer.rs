//! What goes between ranks, and what is checked of it before the library sees it.

use std::fmt;

use crate::abi::Address;
use crate::driver::Stream;
use crate::engine::Engine;
use crate::error::GpuError;
use crate::tensor::DeviceTensor;
use crate::trace::{Noted, note};
use foveate_tensor::ElementType;

/// Numbers side by side in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatArray {
    /// Where they start.
    pub address: Address,
    /// Their type.
    pub element: ElementType,
    /// How many there are.
    pub len: usize,
}

impl FlatArray {
    /// The elements of a tensor in the order that they have in memory, which has to be the same on
    /// all ranks.
    ///
    /// # Errors
    /// When there is something between them, or an element is repeated.
    pub fn of<const N: usize>(tensor: &DeviceTensor<N>) -> Result<Self, GpuError> {
        let layout = &tensor.layout;
        let len = layout.elems();
        let dense = layout.end().is_some_and(|end| len == 0 || end - layout.offset == len);
        if !dense || !layout.is_disjoint() {
            return Err(GpuError::argument(format!(
                "a tensor of shape {:?} with strides {:?} does not lie in one piece; copy it first",
                layout.shape, layout.strides
            )));
        }
        Ok(Self { address: tensor.start(), element: tensor.dtype.into(), len })
    }

    fn bytes(&self) -> usize {
        self.len.saturating_mul(self.element.bytes())
    }

    fn end(&self) -> Address {
        self.address.saturating_add(self.bytes() as Address)
    }

    /// Address of part `rank` when it is cut into parts of the size of `part`.
    fn part(&self, part: &Self, rank: usize) -> Address {
        self.address.wrapping_add(rank.wrapping_mul(part.bytes()) as Address)
    }

    /// Whether its memory can be used.
    fn check(&self, name: &str, engine: &Engine) -> Result<(), GpuError> {
        let Self { address, element, .. } = self;
        if *element == ElementType::I16 {
            return Err(GpuError::argument(format!("{name} is i16, which NCCL does not transfer")));
        }
        if self.len == 0 {
            return Ok(());
        }
        if !address.is_multiple_of(element.bytes() as Address) {
            return Err(GpuError::argument(format!(
                "{name} starts at {address:#x}, which is no multiple of the {} bytes of {}",
                element.bytes(),
                element.name()
            )));
        }
        engine.check_memory(name, *address, self.bytes())
    }
}

/// The number of a type in `ncclDataType_t`.
pub(super) fn data_type(element: ElementType) -> i32 {
    match element {
        ElementType::I8 => 0,
        ElementType::Bool | ElementType::U8 => 1,
        ElementType::I32 => 2,
        ElementType::I64 => 4,
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::BF16 => 9,
        ElementType::I16 => unreachable!("refused when the array was checked"),
    }
}

/// How the numbers of the ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
    /// Their sum over the number of ranks.
    Mean,
}

impl Reduce {
    /// Its number in `ncclRedOp_t`.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Sum => 0,
            Self::Max => 2,
            Self::Mean => 4,
        }
    }
}

/// One rank's part in what goes between ranks. All ranks of a communicator take part in the same
/// collectives in the same order, with arrays of the same lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Every rank gets all ranks' numbers reduced. In place when both arrays are the same.
    AllReduce {
        /// This rank's numbers.
        from: FlatArray,
        /// The result, of the same length.
        into: FlatArray,
        /// How.
        reduce: Reduce,
    },
    /// Every rank gets all ranks' numbers, one after the other. In place when `from` is this
    /// rank's part of `into`.
    AllGather {
        /// This rank's numbers.
        from: FlatArray,
        /// As many for each rank.
        into: FlatArray,
    },
    /// Every rank gets its part of all ranks' numbers reduced. In place when `into` is this rank's
    /// part of `from`.
    ReduceScatter {
        /// This rank's numbers: a part for each rank.
        from: FlatArray,
        /// This rank's part.
        into: FlatArray,
        /// How.
        reduce: Reduce,
    },
    /// Every rank gets the numbers of `root`, in place.
    Broadcast {
        /// Read on the root, written on the others.
        array: FlatArray,
        /// Whose numbers.
        root: usize,
    },
    /// What another rank receives.
    Send {
        /// The numbers.
        from: FlatArray,
        /// Who.
        to: usize,
    },
    /// What another rank sends.
    Receive {
        /// Where the numbers go.
        into: FlatArray,
        /// Whose.
        from: usize,
    },
}

impl Transfer {
    /// Whether `rank` of `ranks` on the device of `engine` can take part so.
    pub(super) fn check(&self, rank: usize, ranks: usize, engine: &Engine) -> Result<(), GpuError> {
        let is_rank = |name: &str, given: usize| {
            if given < ranks {
                return Ok(());
            }
            let reason = format!("{name} is rank {given}; there are {ranks}, counted from 0");
            Err(GpuError::argument(reason))
        };
        match self {
            Self::AllReduce { from, into, .. } => {
                fit(from, into, 1)?;
                check_both(from, into, from.address == into.address, engine)
            }
            Self::AllGather { from, into } => {
                fit(into, from, ranks)?;
                check_both(from, into, from.address == into.part(from, rank), engine)
            }
            Self::ReduceScatter { from, into, .. } => {
                fit(from, into, ranks)?;
                check_both(from, into, into.address == from.part(into, rank), engine)
            }
            Self::Broadcast { array, root } => {
                is_rank("the root", *root)?;
                array.check("the array", engine)
            }
            Self::Send { from, to } => {
                is_rank("the receiver", *to)?;
                from.check("from", engine)
            }
            Self::Receive { into, from } => {
                is_rank("the sender", *from)?;
                into.check("into", engine)
            }
        }
    }
}

impl Transfer {
    /// Notes what it reads and writes, for whoever checks the order of work.
    pub(super) fn note(&self, on: &Stream) {
        let (read, written) = match self {
            Self::AllReduce { from, into, .. }
            | Self::AllGather { from, into }
            | Self::ReduceScatter { from, into, .. } => (Some(from), Some(into)),
            Self::Broadcast { array, .. } => (Some(array), Some(array)),
            Self::Send { from, .. } => (Some(from), None),
            Self::Receive { into, .. } => (None, Some(into)),
        };
        let (name, span) = (|| self.to_string(), |array: &FlatArray| (array.address, array.end()));
        if let Some(array) = read.filter(|array| array.len > 0) {
            note(|| Noted::Read { name: name(), span: span(array), stream: on.number() });
        }
        if let Some(array) = written.filter(|array| array.len > 0) {
            note(|| Noted::Written { name: name(), span: span(array), stream: on.number() });
        }
    }
}

/// Whether `whole` has `parts` times as many numbers as `part`.
fn fit(whole: &FlatArray, part: &FlatArray, parts: usize) -> Result<(), GpuError> {
    if whole.element == part.element && part.len.checked_mul(parts) == Some(whole.len) {
        return Ok(());
    }
    let text = |array: &FlatArray| format!("{} {}", array.len, array.element.name());
    Err(GpuError::argument(format!(
        "{} go with {} in parts for {parts} ranks, not with {}",
        text(whole),
        text(&FlatArray { len: whole.len / parts, ..*whole }),
        text(part)
    )))
}

fn check_both(
    from: &FlatArray,
    into: &FlatArray,
    in_place: bool,
    engine: &Engine,
) -> Result<(), GpuError> {
    let apart = from.end() <= into.address || into.end() <= from.address;
    if !(apart || in_place || from.len == 0) {
        return Err(GpuError::argument(
            "into overlaps from; give it memory of its own, or exactly that of this rank's part",
        ));
    }
    from.check("from", engine)?;
    into.check("into", engine)
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, array) = match self {
            Self::AllReduce { from, .. } => ("all-reduce", from),
            Self::AllGather { from, .. } => ("all-gather", from),
            Self::ReduceScatter { from, .. } => ("reduce-scatter", from),
            Self::Broadcast { array, .. } => ("broadcast", array),
            Self::Send { from, .. } => ("send", from),
            Self::Receive { into, .. } => ("receive", into),
        };
        write!(f, "{name} of {} {}", array.len, array.element.name())
    }
}
