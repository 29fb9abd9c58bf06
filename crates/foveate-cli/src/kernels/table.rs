//! What kernels took when somebody last looked: `conformance/kernel-resources.toml`.
//!
//! A row holds what makes a kernel slower when it grows, and nothing that every change of a few
//! instructions moves. Registers are recorded by class: the most that a thread may take while an SM
//! holds as many CTAs. Local memory counts from what the planner allows. So a row changes when a
//! kernel loses or wins occupancy, starts to spill, or is planned otherwise.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs};

use foveate_cuda::compile::check::Taken;
use foveate_cuda::compile::resources::{LOCAL_BYTES_ALLOWED, Resources};
use foveate_cuda::compile::spill_fallback::Fallback;
use foveate_gpu::Arch;
use foveate_gpu::profile::{Profile, REGISTERS_PER_THREAD};
use serde::{Deserialize, Serialize};

use super::list::{ARCHS, Checked, Cta, Listed};
use crate::failure::Failure;

/// The table as it was when this program was built.
const RECORDED: &str = include_str!("../../../../conformance/kernel-resources.toml");

/// By architecture, then by kernel, as [`rows`] calls them.
#[derive(Debug, Default, Deserialize)]
pub struct Table(BTreeMap<String, BTreeMap<String, Row>>);

/// The names of what was found of a kernel and its place in the table: one row for each entry point
/// of its file, of which the kernel's own, the first, has no name but the kernel's.
pub fn rows(kernel: &dyn Listed, found: &Checked) -> impl Iterator<Item = (String, Taken)> {
    let own = kernel.name();
    found.entries.iter().enumerate().map(move |(i, (entry, taken))| match i {
        0 => (own.clone(), *taken),
        _ => (format!("{own}: {}", entry.trim_start_matches("fv_")), *taken),
    })
}

/// What is recorded of one entry point: a line of numbers, and words where there is more to say, so
/// that the table is short enough to be read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Vec<Cell>")]
struct Row {
    tiles: [u32; 4],
    taken: Taken,
    /// [`Cta::hopper`].
    hopper: Vec<String>,
    fallback: Option<Fallback>,
}

/// A number or a word of a row.
#[derive(Deserialize)]
#[serde(untagged)]
enum Cell {
    Number(u32),
    Word(String),
}

/// What is written of a kernel that runs in place of the planner's choice.
const FALLBACKS: [(Fallback, &str); 3] = [
    (Fallback::Serialised, "for one serialised"),
    (Fallback::Spilled, "for one that spills"),
    (Fallback::Refused, "for one refused"),
];

impl Row {
    fn new(arch: Arch, found: &Checked, taken: Taken) -> Self {
        let cta = &found.cta;
        let spills = taken.local_bytes > LOCAL_BYTES_ALLOWED;
        let taken = Taken {
            registers: register_class(arch, cta, taken),
            local_bytes: if spills { taken.local_bytes } else { 0 },
            ..taken
        };
        let hopper = cta.hopper.iter().map(|word| (*word).to_owned()).collect();
        Self { tiles: cta.numbers, taken, hopper, fallback: found.fallback }
    }

    /// Its line in the table.
    fn text(&self) -> String {
        let Self { tiles, taken, hopper, fallback } = self;
        let mut cells: Vec<String> = tiles.iter().map(u32::to_string).collect();
        cells.extend(
            [taken.shared_bytes, taken.registers, taken.local_bytes].map(|n| n.to_string()),
        );
        let local = Some(taken.local_among_products).filter(|&count| count > 0);
        cells.extend(local.map(|n| n.to_string()));
        cells.extend(hopper.iter().map(|word| format!("{word:?}")));
        let why = FALLBACKS.iter().find(|(why, _)| Some(*why) == *fallback);
        cells.extend(why.map(|(_, words)| format!("{words:?}")));
        format!("[{}]", cells.join(", "))
    }
}

/// The most registers of a thread with which an SM of `arch` holds as many CTAs as with those taken.
fn register_class(arch: Arch, cta: &Cta, taken: Taken) -> u32 {
    let (_, card) =
        ARCHS.iter().find(|(listed, _)| *listed == arch).expect("a listed architecture");
    let profile = Profile::named(card).expect("each architecture is listed with a card");
    let ctas = |registers: u32| {
        let resources = Resources {
            roles: Vec::new(),
            threads: 32 * cta.numbers[2] as usize,
            shared_bytes: taken.shared_bytes as usize,
            shared: Vec::new(),
            registers: registers as usize,
            needed: 0,
        };
        resources.occupancy(&profile).ctas
    };
    let now = ctas(taken.registers);
    let more = taken.registers..=REGISTERS_PER_THREAD as u32;
    more.take_while(|&registers| ctas(registers) == now).last().unwrap_or(taken.registers)
}

impl TryFrom<Vec<Cell>> for Row {
    type Error = String;

    fn try_from(cells: Vec<Cell>) -> Result<Self, String> {
        let (mut numbers, mut hopper, mut fallback) = (Vec::new(), Vec::new(), None);
        for cell in cells {
            match cell {
                Cell::Number(n) => numbers.push(n),
                Cell::Word(word) => match FALLBACKS.iter().find(|(_, words)| *words == word) {
                    Some((why, _)) => fallback = Some(*why),
                    None => hopper.push(word),
                },
            }
        }
        let length = || format!("a row has 7 or 8 numbers, not {}", numbers.len());
        let [q, kv, warps, stages, shared_bytes, registers, local_bytes, ref more @ ..] =
            numbers[..]
        else {
            return Err(length());
        };
        let local_among_products = match *more {
            [] => 0,
            [count] => count,
            _ => return Err(length()),
        };
        let tiles = [q, kv, warps, stages];
        let taken = Taken { registers, local_bytes, shared_bytes, local_among_products };
        Ok(Self { tiles, taken, hopper, fallback })
    }
}

/// How a kernel stands to the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It takes what it took.
    Recorded,
    /// It takes less, or is planned otherwise, or as planned again: the table is to be updated.
    Changed,
    /// The table does not have it.
    New,
    /// It takes more, or runs in place of the planner's choice otherwise than is recorded.
    Worse,
}

impl Table {
    /// The table that was built in.
    pub fn recorded() -> Result<Self, Failure> {
        toml::from_str(RECORDED)
            .map_err(|e| Failure::new(format!("the recorded table cannot be read: {e}")))
    }

    /// Compares an entry point with its row.
    pub fn standing(&self, arch: Arch, name: &str, found: &Checked, taken: &Taken) -> Standing {
        let now = Row::new(arch, found, *taken);
        let row = self.0.get(&arch.to_string()).and_then(|rows| rows.get(name));
        let chosen = |row: &Row| (row.tiles, row.hopper.clone(), row.fallback);
        if now.fallback.is_some() && row.map(chosen) != Some(chosen(&now)) {
            return Standing::Worse;
        }
        let Some(row) = row else { return Standing::New };
        if chosen(row) != chosen(&now) {
            return Standing::Changed;
        }
        let worse = now.taken.registers > row.taken.registers
            || now.taken.local_bytes > row.taken.local_bytes
            || now.taken.shared_bytes > row.taken.shared_bytes
            || now.taken.local_among_products > row.taken.local_among_products;
        match (worse, *row == now) {
            (true, _) => Standing::Worse,
            (false, true) => Standing::Recorded,
            (false, false) => Standing::Changed,
        }
    }

    /// Removes every row of `arch`.
    pub fn remove(&mut self, arch: Arch) {
        self.0.remove(&arch.to_string());
    }

    /// Adds or replaces the rows of a kernel.
    pub fn record(&mut self, kernel: &dyn Listed, found: &Checked) {
        let table = self.0.entry(kernel.arch().to_string()).or_default();
        for (name, taken) in rows(kernel, found) {
            table.insert(name, Row::new(kernel.arch(), found, taken));
        }
    }

    /// Writes the table, a line for each entry point.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let mut text = format!(
            "# What the kernels that the planner chooses take of an SM, or those that run in place of\n\
             # what took more than planned. `foveate kernels check` compares with it, with --update it\n\
             # writes it. The numbers: queries and keys of a tile, warps, stages; bytes of shared\n\
             # memory of a CTA; the most registers of a thread with which an SM holds as many CTAs as\n\
             # with those taken; bytes of local memory of a thread, 0 up to {LOCAL_BYTES_ALLOWED}; and of a\n\
             # Hopper kernel the instructions that read or write local memory among its products,\n\
             # where there are any. Then words: its family where that is Hopper's, how it is made,\n\
             # and why it runs in place of the planner's choice, where it does.\n",
        );
        for (arch, rows) in &self.0 {
            text += &format!("\n[{arch}]\n");
            for (name, row) in rows {
                text += &format!("\"{name}\" = {}\n", row.text());
            }
        }
        fs::write(path, text)
            .map_err(|e| Failure::new(format!("{} cannot be written: {e}", path.display())))
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recorded => "as recorded",
            Self::Changed => "changed",
            Self::New => "new",
            Self::Worse => "WORSE",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::list::list;

    const HOPPER: Arch = Arch::new((9, 0));

    #[test]
    fn what_is_written_is_read_again_and_what_grows_is_worse() {
        let kernel = &list(HOPPER, true).unwrap()[0];
        // Eight warps: with up to 128 registers a thread, an SM holds two CTAs; with up to 80 three.
        let cta =
            Cta { numbers: [64, 64, 8, 1], hopper: vec!["hopper"], words: "8 warps".to_owned() };
        let taken =
            Taken { registers: 100, local_bytes: 8, shared_bytes: 1000, local_among_products: 2 };
        let more = Taken { registers: 50, local_among_products: 0, ..taken };
        let entries = vec![("fv_delta".to_owned(), taken), ("fv_row_weight_sum".to_owned(), more)];
        let mut found = Checked { cta, entries, fallback: None, note: None };
        let mut table = Table::default();
        table.record(kernel, &found);
        let file = tempfile::NamedTempFile::new().unwrap();
        table.write(file.path()).unwrap();
        let table: Table = toml::from_str(&fs::read_to_string(file.path()).unwrap()).unwrap();

        let name = kernel.name();
        let with = |change: fn(&mut Taken)| {
            let mut taken = taken;
            change(&mut taken);
            table.standing(HOPPER, &name, &found, &taken)
        };
        assert_eq!(with(|_| ()), Standing::Recorded);
        assert_eq!(with(|t| t.registers = 128), Standing::Recorded);
        assert_eq!(with(|t| t.registers = 81), Standing::Recorded);
        assert_eq!(with(|t| t.registers = 129), Standing::Worse);
        assert_eq!(with(|t| t.registers = 80), Standing::Changed);
        assert_eq!(with(|t| t.local_bytes = LOCAL_BYTES_ALLOWED), Standing::Recorded);
        assert_eq!(with(|t| t.local_bytes = LOCAL_BYTES_ALLOWED + 1), Standing::Worse);
        assert_eq!(with(|t| t.shared_bytes += 1), Standing::Worse);
        assert_eq!(with(|t| t.shared_bytes -= 1), Standing::Changed);
        assert_eq!(with(|t| t.local_among_products = 3), Standing::Worse);
        assert_eq!(with(|t| t.local_among_products = 0), Standing::Changed);
        let second = format!("{name}: row_weight_sum");
        assert_eq!(table.standing(HOPPER, &second, &found, &more), Standing::Recorded);
        assert_eq!(table.standing(HOPPER, &second, &found, &taken), Standing::Worse);

        assert_eq!(table.standing(Arch::new((8, 0)), &name, &found, &taken), Standing::New);
        let with = |change: fn(&mut Checked)| {
            let mut found = found.clone();
            change(&mut found);
            table.standing(HOPPER, &name, &found, &taken)
        };
        assert_eq!(with(|f| f.cta.numbers[0] *= 2), Standing::Changed);
        assert_eq!(with(|f| f.cta.hopper.clear()), Standing::Changed);
        assert_eq!(with(|f| f.fallback = Some(Fallback::Spilled)), Standing::Worse);
        // Of a kernel that nobody has recorded, too.
        found.fallback = Some(Fallback::Serialised);
        assert_eq!(table.standing(Arch::new((8, 0)), &name, &found, &taken), Standing::Worse);
        let mut table = table;
        table.record(kernel, &found);
        table.write(file.path()).unwrap();
        let table: Table = toml::from_str(&fs::read_to_string(file.path()).unwrap()).unwrap();
        let with = |change: fn(&mut Checked)| {
            let mut found = found.clone();
            change(&mut found);
            table.standing(HOPPER, &name, &found, &taken)
        };
        assert_eq!(with(|_| ()), Standing::Recorded);
        assert_eq!(with(|f| f.fallback = None), Standing::Changed);
        assert_eq!(with(|f| f.fallback = Some(Fallback::Spilled)), Standing::Worse);
        assert_eq!(with(|f| f.cta.hopper.clear()), Standing::Worse);
    }

    #[test]
    fn a_row_of_another_length_is_an_error() {
        for row in ["[1, 2, 3]", "[1, 2, 3, 4, 5, 6, 7, 8, 9]"] {
            let read = toml::from_str::<Table>(&format!("[sm_90]\n\"forward\" = {row}\n"));
            let said = read.unwrap_err().to_string();
            assert!(said.contains("a row has 7 or 8 numbers, not "), "{said}");
        }
    }

    #[test]
    fn the_recorded_table_can_be_read() {
        let table = Table::recorded().unwrap();
        for (arch, _) in crate::kernels::list::ARCHS {
            assert!(table.0.contains_key(&arch.to_string()), "{arch} is not in the table");
        }
    }
}
