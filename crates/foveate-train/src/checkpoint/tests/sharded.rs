//! Checkpoints that several ranks wrote: by each of some meshes, read by each other one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foveate::DType;
use foveate_nn::{
    Carrier, Cutting, HostTransfers, NnError, Peers, ProcessMemory, Sharing, StateMemory,
};

use super::super::content::{Content, HostCopy, Kept, Values};
use super::super::layout;
use super::super::save::{Save, Written};
use super::super::store::Store;
use super::*;

/// What each rank of a mesh holds, of the elements of all parameters.
type Owned = Vec<Vec<Range<usize>>>;

/// Elements of a range in a file at most: a few of them in each tensor.
const SMALL: usize = 300;

/// `range` in equal parts.
fn cut(range: Range<usize>, parts: usize) -> Vec<Range<usize>> {
    let at = |part: usize| range.start + range.len() * part / parts;
    (0..parts).map(|part| at(part)..at(part + 1)).collect()
}

/// Each group of parameters in equal parts, as `shard` cuts it.
fn groups(model: &Model, parts: usize) -> Owned {
    let groups: Vec<_> =
        model.layout().groups().iter().map(|group| cut(group.place.clone(), parts)).collect();
    (0..parts).map(|part| groups.iter().map(|group| group[part].clone()).collect()).collect()
}

/// Six meshes: one rank; 3 ranks that cut all in one; 2, 4 and 8 that cut each group; and 2 × 3 that cut rows of
/// 16 elements, then each of these.
fn meshes(model: &Model) -> Vec<(&'static str, Owned)> {
    let elems = model.layout().elems();
    let whole = std::iter::once(0..elems).collect::<Vec<_>>();
    let rows =
        |part: usize| (part..elems.div_ceil(16)).step_by(2).map(|row| 16 * row..16 * (row + 1));
    let six = (0..6).map(|rank| rows(rank / 3).map(|row| cut(row, 3)[rank % 3].clone()).collect());
    // What replicas hold, too, the first of them writes.
    let mut replicated = groups(model, 4);
    replicated.extend(vec![Vec::new(); 4]);
    vec![
        ("one", vec![whole.clone()]),
        ("flat 3", cut(0..elems, 3).into_iter().map(|range| vec![range]).collect()),
        ("shard 2", groups(model, 2)),
        ("replicate 2, shard 4", replicated),
        ("shard 8", groups(model, 8)),
        ("tensor 2, shard 3", six.collect()),
    ]
}

/// A copy of the elements `owned`, beside steps.
fn copy_of(
    model: &Model,
    snapshot: &Snapshot<'_>,
    owned: &[Range<usize>],
) -> HostCopy<ProcessMemory> {
    let memory = Arc::new(model.state_memory());
    let bytes = model.state_bytes(&RULE, owned).unwrap();
    memory.reserve(bytes, &AtomicBool::new(false)).unwrap();
    HostCopy::begin(snapshot, owned, &memory).unwrap()
}

/// What all ranks wrote, in order of rank, and where.
fn written(dir: &Path, run: &SavedRun, owned: &Owned) -> (Save, Vec<Written>) {
    let save = Save::of(dir, run.state.step, 2);
    assert!(save.begin().unwrap());
    let snapshot = run.snapshot(SaveDtype::F32);
    let content = Content::of(&snapshot).unwrap();
    let write = |(rank, owned): (usize, &Vec<Range<usize>>)| {
        // Every second rank from a copy.
        let copy = copy_of(&run.model, &snapshot, owned);
        let values: &dyn Values = if rank % 2 == 0 { &snapshot } else { &copy };
        save.write_part_with(&content, values, owned, rank, &create, (4 * 500, SMALL)).unwrap()
    };
    let all = owned.iter().enumerate().map(write).collect();
    (save, all)
}

fn saved(dir: &Path, run: &SavedRun, owned: &Owned) -> PathBuf {
    let (save, all) = written(dir, run, owned);
    save.commit(all).unwrap()
}

/// The elements `owned` of what is kept, as the checkpoint has them.
fn read(place: &Path, model: &Model, kept: Kept, owned: &[Range<usize>]) -> Vec<f32> {
    let sums = Checksums::Verify.of_ours(place).unwrap();
    let mut store = Store::of_layout(place, sums.as_ref()).unwrap().unwrap();
    let mut found = Vec::new();
    for p in model.parameters() {
        for range in owned {
            let (start, end) = (range.start.max(p.place.start), range.end.min(p.place.end));
            if start < end {
                let part = start - p.place.start..end - p.place.start;
                let mut put = |values: &[f32]| {
                    found.extend_from_slice(values);
                    Ok(())
                };
                store.read(&layout::tensor(kept, p), p.place.len(), part, &mut put).unwrap();
            }
        }
    }
    found
}

#[test]
fn every_mesh_reads_what_every_other_one_wrote_bit_for_bit() {
    let run = SavedRun::new(1, 20);
    let meshes = meshes(&run.model);
    for (wrote, owned) in &meshes {
        let dir = tempfile::tempdir().unwrap();
        let place = saved(dir.path(), &run, owned);
        // Whole, as one rank resumes.
        let mut other = model(2);
        let (moments, state) = load_state(&place, &mut other, &RULE, Checksums::Verify).unwrap();
        assert_eq!((moments, state), (run.moments.clone(), run.state.clone()), "{wrote}");
        assert_eq!(other.weights(), run.model.weights(), "{wrote}");
        let mut weights = model(3);
        assert!(load_weights(&place, &mut weights, Checksums::Verify).unwrap().is_empty());
        assert_eq!(weights.weights(), run.model.weights(), "{wrote}");
        assert_eq!(read_config(&place, Checksums::Verify).unwrap().model, config());
        let arrays = [
            (Kept::Weight, run.model.weights()),
            (Kept::Moment(Moment::Mean), &run.moments.mean),
            (Kept::Moment(Moment::Square), &run.moments.square),
        ];
        for (reads, others) in &meshes {
            for owned in others {
                for (kept, array) in &arrays {
                    let inside = |p: &foveate_nn::Parameter, range: &Range<usize>| {
                        range.start.max(p.place.start)..range.end.min(p.place.end)
                    };
                    let wanted: Vec<f32> = (run.model.parameters().iter())
                        .flat_map(|p| owned.iter().map(move |range| inside(p, range)))
                        .flat_map(|part| if part.is_empty() { &[] } else { &array[part] })
                        .copied()
                        .collect();
                    let found = read(&place, &run.model, *kept, owned);
                    let same = found.len() == wanted.len()
                        && found.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{wrote} read by {reads}");
                }
            }
        }
    }
}

/// Nothing is sent while a checkpoint is read.
struct Silent;

impl Sharing for Silent {
    fn peers(&self) -> Result<Box<dyn Peers>, NnError> {
        unreachable!("a CPU moves parameters through its own memory")
    }

    fn reduce_dtype(&self) -> DType {
        DType::F32
    }

    fn replicas(&self) -> Result<Option<Box<dyn Peers>>, NnError> {
        unreachable!("a CPU sums gradients in its own memory")
    }

    fn carrier(&self) -> Carrier {
        Carrier::Auto
    }

    fn through_host(&self) -> Result<Box<dyn HostTransfers>, NnError> {
        Ok(Box::new(Self))
    }
}

impl HostTransfers for Silent {
    fn gather(&mut self, _: Vec<f32>) -> Result<(), NnError> {
        unreachable!("no pass runs")
    }

    fn gathered(&mut self) -> Result<Vec<Vec<f32>>, NnError> {
        unreachable!("no pass runs")
    }

    fn reduce(&mut self, _: Vec<f32>, _: &[Range<usize>]) -> Result<(), NnError> {
        unreachable!("no pass runs")
    }

    fn reduced(&mut self) -> Result<Vec<f32>, NnError> {
        unreachable!("no pass runs")
    }
}

/// A model without its weights, of which this is rank `part` of `parts`.
fn share(parts: usize, part: usize) -> Model {
    let mut model = Model::unfilled(config(), &attention()).unwrap();
    let cutting = Cutting { parts, ..Cutting::WHOLE };
    model.cut(cutting, part, &Silent).unwrap();
    model
}

#[test]
fn ranks_that_share_parameters_load_their_elements_of_what_any_mesh_wrote() {
    let run = SavedRun::new(1, 20);
    let mut places = Vec::new();
    for (_, owned) in &meshes(&run.model) {
        let dir = tempfile::tempdir().unwrap();
        places.push((saved(dir.path(), &run, owned), dir));
    }
    // One rank's own, too.
    let dir = tempfile::tempdir().unwrap();
    places.push((save(dir.path(), &run.snapshot(SaveDtype::F32), 1).unwrap(), dir));
    for (place, _dir) in &places {
        for parts in [1, 2, 3, 8] {
            let mut elems = 0;
            for part in 0..parts {
                let mut model = share(parts, part);
                let read = load_state(place, &mut model, &RULE, Checksums::Verify);
                let (moments, state) = read.unwrap();
                assert_eq!(state, run.state);
                let mut weights = share(parts, part);
                assert!(load_weights(place, &mut weights, Checksums::Verify).unwrap().is_empty());
                for p in run.model.parameters() {
                    for (own, _) in model.share().pieces(&p.place) {
                        elems += own.len();
                        let mut values = vec![f32::NAN; own.len()];
                        let is = |values: &[f32], with: &[f32]| {
                            let with = with[own.clone()].iter().map(|x| x.to_bits());
                            values.iter().map(|x| x.to_bits()).eq(with)
                        };
                        model.masters(own.start, &mut values).unwrap();
                        assert!(is(&values, run.model.weights()), "{} of {parts}", p.name);
                        weights.masters(own.start, &mut values).unwrap();
                        assert!(is(&values, run.model.weights()), "{} of {parts}", p.name);
                        let kept = [
                            (Moment::Mean, &moments.mean, &run.moments.mean),
                            (Moment::Square, &moments.square, &run.moments.square),
                        ];
                        for (moment, found, wanted) in kept {
                            model.download_moment(moment, found, own.start, &mut values).unwrap();
                            assert!(is(&values, wanted), "{moment:?} of {} of {parts}", p.name);
                        }
                    }
                }
            }
            assert_eq!(elems as u64, run.model.layout().parameter_count(), "{parts} ranks");
        }
    }
}

#[test]
fn a_rank_does_not_read_the_files_of_others() {
    let run = SavedRun::new(1, 20);
    let dir = tempfile::tempdir().unwrap();
    let owned: Owned = (0..4)
        .map(|part| {
            let share = run.model.layout().share(part, 4);
            share.pieces(&(0..run.model.layout().elems())).into_iter().map(|(own, _)| own).collect()
        })
        .collect();
    let place = saved(dir.path(), &run, &owned);
    for entry in fs::read_dir(&place).unwrap() {
        let file = entry.unwrap().path();
        if file.file_name().unwrap().to_str().unwrap().starts_with("part-00003") {
            let mut bytes = fs::read(&file).unwrap();
            bytes.iter_mut().rev().take(40).for_each(|byte| *byte ^= 1);
            fs::write(&file, bytes).unwrap();
        }
    }
    let load = |part| load_state(&place, &mut share(4, part), &RULE, Checksums::Verify);
    for part in 0..3 {
        load(part).unwrap();
    }
    let told = load(3).unwrap_err().to_string();
    assert!(told.contains("part-00003") && told.contains("does not match its checksum"), "{told}");
}

#[test]
fn a_range_that_is_missing_or_there_twice_is_refused_by_name_and_nothing_stays() {
    let run = SavedRun::new(1, 20);
    let owned = groups(&run.model, 3);
    let dir = tempfile::tempdir().unwrap();
    let (save, mut all) = written(dir.path(), &run, &owned);
    all.remove(1);
    let told = save.commit(all).unwrap_err().to_string();
    let first = &run.model.parameters()[0];
    let Range { start: from, end: to } = owned[1][0].clone();
    let wanted = format!("elements {from}..{to} are missing of tensor `mean:{}`", first.name);
    assert!(told.contains("layout.json") && told.contains(&wanted), "{told}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing half-written stays");
    let mut twice = owned.clone();
    twice[2].push(5..9);
    let (save, all) = written(dir.path(), &run, &twice);
    let told = save.commit(all).unwrap_err().to_string();
    assert!(told.contains("elements 5..9 are there twice of tensor `mean:model.embed"), "{told}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // A checkpoint whose layout or files were changed.
    let place = saved(dir.path(), &run, &owned);
    let refused = |checksums| {
        let ours = load_state(&place, &mut model(2), &RULE, checksums).unwrap_err().to_string();
        let weights = load_weights(&place, &mut model(2), checksums).unwrap_err().to_string();
        assert_eq!(ours, weights);
        ours
    };
    let (file, gone) = (place.join("part-00001-00000.safetensors"), dir.path().join("gone"));
    fs::rename(&file, &gone).unwrap();
    let told = refused(Checksums::Skip);
    assert!(told.contains("part-00001-00000.safetensors: is missing, where elements"), "{told}");
    fs::rename(&gone, &file).unwrap();
    let path = place.join("layout.json");
    fs::rename(&path, &gone).unwrap();
    for told in [
        load_state(&place, &mut model(2), &RULE, Checksums::Skip).unwrap_err(),
        load_weights(&place, &mut model(2), Checksums::Skip).unwrap_err(),
    ] {
        assert!(told.to_string().contains("layout.json: is missing"), "{told}");
    }
    fs::rename(&gone, &path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let ranges = json["tensors"]["weight:model.norm.weight"]["ranges"].as_array_mut().unwrap();
    ranges.pop();
    fs::write(&path, json.to_string()).unwrap();
    assert!(refused(Checksums::Verify).contains("layout.json: does not match its checksum"));
    let told = refused(Checksums::Skip);
    assert!(told.contains("are missing of tensor `weight:model.norm.weight`"), "{told}");
    // The first range once more, in its place and behind the others.
    for at in [0, usize::MAX] {
        let mut json: Value = serde_json::from_str(&text).unwrap();
        let ranges = json["tensors"]["weight:model.norm.weight"]["ranges"].as_array_mut().unwrap();
        let again = ranges[0].clone();
        ranges.insert(at.min(ranges.len()), again);
        fs::write(&path, json.to_string()).unwrap();
        assert!(refused(Checksums::Verify).contains("layout.json: does not match its checksum"));
        let told = refused(Checksums::Skip);
        let wanted = "are there twice of tensor `weight:model.norm.weight`";
        assert!(told.contains("layout.json: elements ") && told.contains(wanted), "{told}");
    }
    fs::write(&path, text).unwrap();
    // Flipped bytes are found in whichever file they are.
    for entry in fs::read_dir(&place).unwrap() {
        let file = entry.unwrap().path();
        if !file.display().to_string().ends_with(".safetensors") {
            continue;
        }
        let whole = fs::read(&file).unwrap();
        let mut flipped = whole.clone();
        let last = flipped.len() - 2;
        flipped[last] ^= 4;
        fs::write(&file, &flipped).unwrap();
        let told = load_state(&place, &mut model(2), &RULE, Checksums::Verify).unwrap_err();
        let told = told.to_string();
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(told.contains(name) && told.contains("does not match its checksum"), "{told}");
        fs::write(&file, whole).unwrap();
    }
    load_state(&place, &mut model(2), &RULE, Checksums::Verify).unwrap();
}

#[test]
fn a_rank_reads_no_more_than_the_ranges_it_needs_and_their_neighbours() {
    let run = SavedRun::new(1, 20);
    let dir = tempfile::tempdir().unwrap();
    let place = saved(dir.path(), &run, &groups(&run.model, 4));
    let sums = Checksums::Verify.of_ours(&place).unwrap();
    // All files but those of the second of four are gone after the layout was read.
    let mut store = Store::of_layout(&place, sums.as_ref()).unwrap().unwrap();
    for entry in fs::read_dir(&place).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("part-") && !name.starts_with("part-00001") {
            fs::remove_file(file).unwrap();
        }
    }
    let p = &run.model.parameters()[0];
    let quarter = groups(&run.model, 4)[1][0].clone();
    let mut found = Vec::new();
    let mut put = |values: &[f32]| {
        found.extend_from_slice(values);
        Ok(())
    };
    let name = layout::tensor(Kept::Weight, p);
    store.read(&name, p.place.len(), quarter.clone(), &mut put).unwrap();
    assert_eq!(found, run.model.values(p)[quarter.clone()]);
    let next = quarter.end..quarter.end + 1;
    assert!(store.read(&name, p.place.len(), next, &mut |_| Ok(())).is_err());
}

#[test]
fn a_disk_that_fills_up_under_any_rank_leaves_the_earlier_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 1);
    let owned = groups(&run.model, 2);
    let first = saved(dir.path(), &run, &owned);
    let later = SavedRun::new(2, 2);
    let snapshot = later.snapshot(SaveDtype::F32);
    let content = Content::of(&snapshot).unwrap();
    for (rank, room) in [(0, 0), (0, 1000), (1, 0), (1, 3000)] {
        let left = Arc::new(AtomicUsize::new(room));
        let full = |path: &Path| {
            let file = File::create(path)?;
            Ok(Box::new(Filling { file, left: Arc::clone(&left) }) as Box<dyn Durable>)
        };
        let save = Save::of(dir.path(), 2, 2);
        assert!(save.begin().unwrap());
        let sizes = (SHARD_BYTES, SMALL);
        let failed = save.write_part_with(&content, &snapshot, &owned[rank], rank, &full, sizes);
        let told = save.abandon(failed.unwrap_err()).of_run(verified(dir.path())).to_string();
        let wanted = format!("continue with --resume: {} is intact", first.display());
        assert!(told.contains(&wanted), "{told}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing half-written stays");
        load_state(&first, &mut model(5), &RULE, Checksums::Verify).unwrap();
    }
}

#[test]
fn a_copy_that_nobody_waits_for_is_not_written_to_the_end() {
    let run = SavedRun::new(1, 1);
    let snapshot = run.snapshot(SaveDtype::F32);
    let content = Content::of(&snapshot).unwrap();
    let all: Vec<Range<usize>> = std::iter::once(0..run.model.layout().elems()).collect();
    let copy = copy_of(&run.model, &snapshot, &all);
    copy.dropped.store(true, Ordering::Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let save = Save::of(dir.path(), 1, 1);
    save.begin().unwrap();
    let told = save.write(&content, &copy).unwrap_err();
    assert!(matches!(told.kind(), crate::error::TrainErrorKind::Interrupted));
}

#[test]
fn an_export_has_the_weights_of_what_ranks_wrote_as_one_rank_would_have_saved_them() {
    let run = SavedRun::new(1, 20);
    let dir = tempfile::tempdir().unwrap();
    let place = saved(dir.path(), &run, &groups(&run.model, 3));
    let beside = tempfile::tempdir().unwrap();
    for dtype in [SaveDtype::F32, SaveDtype::Bf16] {
        let whole = tempfile::tempdir().unwrap();
        let whole = save(whole.path(), &run.snapshot(dtype), 1).unwrap();
        let to = beside.path().join(format!("new/{}", dtype.tag()));
        export(&place, &to, dtype, Checksums::Verify).unwrap();
        let read = |folder: &Path| {
            let mut model = model(9);
            assert!(load_weights(folder, &mut model, Checksums::Verify).unwrap().is_empty());
            model.weights().to_vec()
        };
        assert_eq!(read(&to), read(&whole));
        let (ours, theirs) = (to.join(CONFIG), whole.join(CONFIG));
        assert_eq!(read_json(&ours).unwrap(), read_json(&theirs).unwrap());
        let names = fs::read_dir(to.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name());
        assert!(names.into_iter().all(|n| !n.to_string_lossy().starts_with('.')));
        let told = export(&place, &to, dtype, Checksums::Verify).unwrap_err().to_string();
        assert!(told.ends_with("is there already; give a folder that is not"), "{told}");
        // From one of Hugging Face's layout, too.
        let again = beside.path().join(format!("again-{}", dtype.tag()));
        export(&to, &again, dtype, Checksums::Verify).unwrap();
        let file = |folder: &Path| fs::read(folder.join(SINGLE)).unwrap();
        assert!(file(&again) == file(&to));
        let told = load_state(&to, &mut model(1), &RULE, Checksums::Verify).unwrap_err();
        assert!(told.to_string().contains("state.json: is missing"), "{told}");
    }
    // A value that the dtype cannot hold leaves nothing.
    let mut large = SavedRun::new(1, 1);
    large.model.weights_mut()[3] = 7e4;
    let other = tempfile::tempdir().unwrap();
    let place = saved(other.path(), &large, &groups(&large.model, 2));
    let to = beside.path().join("f16");
    let told = export(&place, &to, SaveDtype::F16, Checksums::Verify).unwrap_err().to_string();
    assert!(told.contains("past the range of F16") && !to.exists(), "{told}");
}

#[test]
fn what_a_checkpoint_holds_is_listed_with_its_bytes() {
    let run = SavedRun::new(1, 20);
    let dir = tempfile::tempdir().unwrap();
    let owned = groups(&run.model, 3);
    for sharded in [false, true] {
        let place = match sharded {
            true => saved(dir.path(), &run, &owned),
            false => save(dir.path(), &run.snapshot(SaveDtype::Bf16), 1).unwrap(),
        };
        let found = contents(&place, Checksums::Verify, true).unwrap();
        assert_eq!((found.sharded, found.state), (sharded, Some(run.state.clone())));
        let names = |kept: &str| {
            let of =
                |t: &&TensorContents| t.name.strip_prefix(kept).is_some_and(|n| n.starts_with(':'));
            found.tensors.iter().filter(of).count()
        };
        let parameters = run.model.parameters().len();
        assert_eq!(["weight", "mean", "square"].map(names), [parameters; 3]);
        let hf = if sharded { 0 } else { parameters };
        assert_eq!(found.tensors.len(), 3 * parameters + hf);
        // The bytes are those of the values.
        for p in run.model.parameters() {
            let name = format!("mean:{}", p.name);
            let tensor = found.tensors.iter().find(|t| t.name == name).unwrap();
            assert_eq!((&tensor.dtype[..], &tensor.shape), ("F32", &p.shape));
            for RangeContents { file, first, elems, bytes, .. } in &tensor.ranges {
                let all = fs::read(place.join(file)).unwrap();
                let there = &all[bytes.start as usize..bytes.end as usize];
                let at = p.place.start + first;
                let values = run.moments.mean[at..at + elems].iter();
                assert!(values.flat_map(|x| x.to_le_bytes()).eq(there.iter().copied()), "{name}");
            }
        }
        fs::remove_dir_all(&place).unwrap();
    }
}
