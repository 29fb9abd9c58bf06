//! The memory of the host beside that of GPUs: what moments and inputs of layers may take of it.
//!
//! Ranks of one machine take of the same memory, and alike, so each may take its share of what is free.

use foveate_nn::{MemoryEstimate, Offload, ParameterState};
use foveate_shard::ShardError;
use foveate_shard::collectives::Collectives;

use crate::machine;
use crate::memory::Setting;

/// What of the host's memory is free, and who takes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that this process may take, were it alone.
    pub free: u64,
    /// Ranks of this machine.
    pub ranks: u64,
}

/// Bytes by which ranks know a machine: some of its name.
const NAME: usize = 64;

impl HostMemory {
    /// That of this machine; none where the system does not say. All `ranks` call it.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    pub fn here(ranks: &dyn Collectives) -> Result<Option<Self>, ShardError> {
        // Before all have told where they are: none takes of it before all have looked.
        let free = machine::free();
        let mut name = [0; NAME];
        let known = machine::id().unwrap_or_default();
        let bytes = known.as_bytes();
        let some = bytes.len().min(NAME);
        name[..some].copy_from_slice(&bytes[..some]);
        let names = match ranks.ranks() {
            1 => vec![name.to_vec()],
            _ => ranks.all_gather(&name)?,
        };
        let here = names.iter().filter(|other| ***other == name).count().max(1) as u64;
        Ok(free.map(|free| Self { free: free.bytes, ranks: here }))
    }

    /// Bytes that each rank may take.
    pub fn each(self) -> u64 {
        self.free / self.ranks
    }

    /// What is left for each rank beside `taken` bytes of it.
    pub fn beside(self, taken: u64) -> u64 {
        self.each().saturating_sub(taken)
    }

    /// Refuses what `setting` takes, by its dry run, where the host has not as much; `nearest` says in words which
    /// setting fits.
    ///
    /// # Errors
    /// What takes how much, of how much, and what would do.
    pub fn admit(
        self,
        setting: &Setting,
        need: &MemoryEstimate,
        nearest: impl FnOnce() -> Option<String>,
    ) -> Result<(), String> {
        if need.host <= self.each() {
            return Ok(());
        }
        let keys = [
            (setting.state == ParameterState::HostMoments)
                .then(|| format!("precision.state = \"{}\"", setting.state.name())),
            (setting.recompute.offload != Offload::None)
                .then(|| format!("train.offload = \"{}\"", setting.recompute.offload.name())),
        ];
        let keys: Vec<String> = keys.into_iter().flatten().collect();
        let of_ranks = match self.ranks {
            1 => String::new(),
            ranks => format!(" for each of {ranks} ranks of this machine"),
        };
        let remedy = match nearest() {
            Some(keys) => format!("with {keys} it fits"),
            None => "leave it out, and lower train.batch_rows or choose a smaller model".to_owned(),
        };
        Err(format!(
            "{} takes {} of the host's memory{of_ranks}, of which {} are free; {remedy}",
            keys.join(" with "),
            size(need.host),
            size(self.free)
        ))
    }
}

/// Refuses inputs of layers in the memory of the host where that is the memory of all arrays.
///
/// # Errors
/// What is asked, and what to do.
pub fn check_offload(offload: Offload, on_gpu: bool) -> Result<(), String> {
    match offload {
        Offload::LayerInputs if !on_gpu => Err(format!(
            "train.offload is \"{}\", but a CPU has all arrays in the memory of the host; leave it out, set \
             train.recompute = \"full\" to keep less, or choose a GPU by run.device",
            offload.name()
        )),
        _ => Ok(()),
    }
}

/// Bytes of memory for people, in MiB below 1 GiB.
pub(crate) fn size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use foveate_nn::{Recomputation, Recompute};
    use foveate_shard::collectives::OneRank;

    use super::*;

    fn setting(state: ParameterState, offload: Offload) -> Setting {
        let recompute = Recomputation { offload, ..Recompute::Full.into() };
        Setting { state, rows: 1, recompute, in_backward: false, one_batch: false }
    }

    #[test]
    fn what_the_host_has_no_memory_for_is_refused_with_what_would_do() {
        let need = MemoryEstimate { host: 60 << 30, ..Default::default() };
        let host = HostMemory { free: 60 << 30, ranks: 1 };
        let moments = setting(ParameterState::HostMoments, Offload::None);
        host.admit(&moments, &need, || unreachable!("it fits")).unwrap();
        let less = HostMemory { free: (60 << 30) - 1, ..host };
        let told = less.admit(&moments, &need, || Some("x = 1".to_owned())).unwrap_err();
        let line = "precision.state = \"host_moments\" takes 60.0 GiB of the host's memory, of which 60.0 \
                    GiB are free; with x = 1 it fits";
        assert_eq!(told, line);
        // Each of two ranks takes as much.
        let two = HostMemory { free: 119 << 30, ranks: 2 };
        let both = setting(ParameterState::HostMoments, Offload::LayerInputs);
        let told = two.admit(&both, &need, || None).unwrap_err();
        let line = "\"host_moments\" with train.offload = \"layer_inputs\" takes 60.0 GiB of the host's \
                    memory for each of 2 ranks of this machine, of which 119.0 GiB are free; leave it out";
        assert!(told.contains(line), "{told}");
        assert_eq!((two.each(), two.beside(59 << 30)), (119 << 29, 1 << 29));
        HostMemory { free: 120 << 30, ..two }.admit(&both, &need, || None).unwrap();
    }

    #[test]
    fn a_cpu_has_no_other_memory_to_put_inputs_in() {
        check_offload(Offload::LayerInputs, true).unwrap();
        check_offload(Offload::None, false).unwrap();
        let told = check_offload(Offload::LayerInputs, false).unwrap_err();
        assert!(
            told.starts_with("train.offload is \"layer_inputs\"") && told.contains("run.device")
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_of_this_machine_share_what_is_free() {
        let alone = HostMemory::here(&OneRank).unwrap().unwrap();
        assert!(alone.ranks == 1 && alone.free > 0 && alone.each() == alone.free);
        let many = foveate_shard::collectives::thread_ranks(3, std::time::Duration::from_secs(60));
        std::thread::scope(|scope| {
            for rank in many {
                scope.spawn(move || {
                    let host = HostMemory::here(&rank).unwrap().unwrap();
                    assert_eq!(host.ranks, 3);
                });
            }
        });
    }
}
