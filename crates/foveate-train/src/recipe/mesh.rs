//! The mesh section: how the ranks of a run stand.

use std::fmt;
use std::io;
use std::num::NonZeroU16;
use std::ops::RangeInclusive;
use std::path::Path;

use foveate::tensor::count::Count;
use foveate_nn::{Carrier, Cutting, Reshard};
use foveate_shard::simulate::Machine;
use foveate_shard::{Axis, Links, Map, Mesh, MeshAxis, Strategy};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::error::TrainError;
use crate::whole;

/// Whose links ranks go by where the strategies of attention are compared: see [`MeshSection::links`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenLinks {
    /// The machine's name or file.
    pub machine: String,
    /// What chose it.
    pub by: &'static str,
    /// What it has.
    pub links: Links,
}

impl fmt::Display for ChosenLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { machine, by, links: Links { host_ranks, host, network, .. } } = self;
        let ranks = Count(*host_ranks, "rank");
        let [host, network] = [host, network].map(|mbps| *mbps as f64 / 1e3);
        write!(
            f,
            "{machine} by {by}: {ranks} a host, {host} GB/s within and {network} GB/s between hosts"
        )
    }
}

/// The machine that comes with the program under `name`, or that the TOML file at this path says.
///
/// # Errors
/// What is wrong with the name or the file, as what follows that of the option: `is \"b200\", which is …`.
pub fn machine(name: &str) -> Result<Machine, String> {
    if name.is_empty() {
        let known = Machine::names().join(", ");
        return Err(format!("is empty; name a machine ({known}) or a file, or leave it out"));
    }
    let unread = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => {
            let known = Machine::names().join(", ");
            format!("is {name:?}, which is neither a machine that is known ({known}) nor a file")
        }
        _ => format!("is {name:?}, a file that could not be read: {e}"),
    };
    let text = match Machine::text_of(name) {
        Some(text) => text.to_owned(),
        None => whole::read_text(Path::new(name)).map_err(unread)?,
    };
    Machine::from_toml(&text).map_err(|e| format!("is {name:?}: {e}"))
}

/// The mesh section. Ranks stand as `replicate × shard × context × tensor`, rank 0 first and the last
/// axis the fastest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MeshSection {
    /// Ranks that cut the rows of a batch and copy parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicate: Option<AxisSize>,
    /// Ranks that cut the rows of a batch, and parameters; all that other axes leave when not given and
    /// no axis is `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<AxisSize>,
    /// Ranks that cut the tokens of a row, and parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<AxisSize>,
    /// Ranks that cut heads, feed-forward columns and the vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<AxisSize>,
    /// How keys and queries of different ranks of `context` meet; the way that receives the fewest
    /// bytes when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    /// Whose links the strategies are compared by: a machine that comes with the program, or a TOML file like
    /// theirs; that of the first rank's GPU when not given. [`super::Recipe::load`] gives the file by its absolute
    /// path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// How long a group of parameters that was gathered from other ranks stays: `always` cut again behind
    /// the layer, `after_backward`, or `never` before the update.
    pub reshard: Reshard,
    /// What gradients of parameters that are cut travel as to be summed in f32: `f32` or `bf16`.
    pub reduce_dtype: ReduceDtype,
    /// What carries parameters and gradients between GPUs: `auto`, `nccl` or `host`.
    pub transfers: Carrier,
    /// Thread blocks that NCCL takes of a GPU for a transfer at most; as many as it likes when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nccl_blocks: Option<usize>,
}

/// What NCCL can be limited to.
const NCCL_BLOCKS: RangeInclusive<usize> = 1..=64;

/// What gradients travel as between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDtype {
    /// IEEE binary32: as they are.
    #[default]
    F32,
    /// bfloat16, rounded to the nearest.
    Bf16,
}

/// The size of an axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisSize {
    /// So many ranks, at least 1.
    Ranks(usize),
    /// What the other axes leave of the ranks.
    Auto,
}

impl MeshSection {
    fn sizes(&self) -> [Option<AxisSize>; 4] {
        [self.replicate, self.shard, self.context, self.tensor]
    }

    /// The mesh of a run of `ranks` ranks.
    ///
    /// # Errors
    /// When the product of the sizes is not the number of ranks.
    pub fn of_ranks(&self, ranks: usize) -> Result<Mesh, TrainError> {
        let mut sizes = self.sizes();
        let auto = sizes.contains(&Some(AxisSize::Auto));
        let open = &mut sizes[MeshAxis::Shard as usize];
        *open = open.or((!auto).then_some(AxisSize::Auto));
        let given = MeshAxis::ALL.into_iter().zip(sizes);
        let parts = given.filter_map(|(axis, size)| size.map(|size| format!("{axis}={size}")));
        Mesh::parse(&parts.collect::<Vec<_>>().join(","), ranks)
            .map_err(|e| TrainError::recipe("[mesh]", e.to_string()))
    }

    /// [`Self::nccl_blocks`] of a section that was checked.
    pub(crate) fn blocks(&self) -> Option<NonZeroU16> {
        let blocks = self.nccl_blocks.and_then(|blocks| u16::try_from(blocks).ok());
        blocks.and_then(NonZeroU16::new)
    }

    /// The links of the machine that the section names, of that whose GPUs are called `gpu`, or of the usual one.
    ///
    /// # Errors
    /// What is wrong with the file of a machine.
    pub fn links(&self, gpu: Option<&str>) -> Result<ChosenLinks, TrainError> {
        let (name, by) = match (&self.machine, gpu.and_then(Machine::name_of_gpu)) {
            (Some(name), _) => (name.as_str(), "mesh.machine"),
            (None, Some(name)) => (name, "the GPU"),
            (None, None) => (Machine::USUAL, "default"),
        };
        let wrong = |why| TrainError::recipe("mesh.machine", why);
        let links = machine(name).map_err(wrong)?.links();
        Ok(ChosenLinks { machine: name.to_owned(), by, links })
    }

    /// Finds the file of a machine from the `folder` of the recipe, and reads it: whatever the mesh, a name that is
    /// wrong is told at once.
    pub(super) fn locate_machine(&mut self, folder: &Path) -> Result<(), String> {
        let Some(name) = &mut self.machine else { return Ok(()) };
        if !name.is_empty()
            && Machine::text_of(name).is_none()
            && let Some(file) = folder.join(&*name).to_str()
        {
            *name = file.to_owned();
        }
        machine(name).map(drop)
    }

    /// How parameters are cut over the ranks of `mesh`.
    pub fn cutting(&self, mesh: &Mesh) -> Cutting {
        let (parts, tensor) = (Map::new(*mesh).parts(Axis::Elements), mesh.size(MeshAxis::Tensor));
        let replicated = mesh.size(MeshAxis::Replicate) > 1;
        let rounds = self.reduce_dtype == ReduceDtype::Bf16;
        Cutting { parts, tensor, replicated, reshard: self.reshard, rounds }
    }

    /// What is wrong without knowing the number of ranks: the key, and why.
    pub(super) fn check(&self) -> Result<(), (String, String)> {
        let autos = MeshAxis::ALL.into_iter().zip(self.sizes());
        let mut autos = autos.filter(|(_, size)| *size == Some(AxisSize::Auto));
        let most = *NCCL_BLOCKS.end();
        if let Some(blocks) = self.nccl_blocks.filter(|blocks| !NCCL_BLOCKS.contains(blocks)) {
            let why = format!("is {blocks}; NCCL takes 1 to {most} thread blocks for a transfer");
            return Err(("mesh.nccl_blocks".to_owned(), why));
        }
        match (autos.next(), autos.next()) {
            (Some((first, _)), Some((second, _))) => {
                let why = format!(
                    "is \"auto\", and so is mesh.{first}; one axis takes what the others leave"
                );
                Err((format!("mesh.{second}"), why))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for AxisSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks(ranks) => write!(f, "{ranks}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl Serialize for AxisSize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Ranks(ranks) => to.serialize_u64(*ranks as u64),
            Self::Auto => to.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for AxisSize {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Size)
    }
}

struct Size;

impl Visitor<'_> for Size {
    type Value = AxisSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of ranks of at least 1, or \"auto\",")
    }

    fn visit_i64<E: de::Error>(self, ranks: i64) -> Result<AxisSize, E> {
        match usize::try_from(ranks) {
            Ok(ranks) if ranks > 0 => Ok(AxisSize::Ranks(ranks)),
            _ => Err(E::invalid_value(de::Unexpected::Signed(ranks), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<AxisSize, E> {
        match text {
            "auto" => Ok(AxisSize::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}
