//! The tensors of a checkpoint, in whichever files they lie.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::checksums::Manifest;
use super::layout::{self, Columns, Layout};
use super::read_json;
use crate::error::TrainError;
use crate::safetensors::{RESTORE, Tensors};

/// Tensors by name, of which any elements can be read.
pub(super) struct Store {
    files: Vec<File>,
    sums: Option<Manifest>,
    tensors: BTreeMap<String, Place>,
}

struct File {
    path: PathBuf,
    /// None until something of it is read.
    open: Option<Tensors>,
    /// That it is not here but on the disk of other ranks, and how to bring it.
    elsewhere: Option<String>,
}

/// Where a tensor is.
struct Place {
    shape: Vec<usize>,
    /// In order, without gaps.
    pieces: Vec<Piece>,
}

struct Piece {
    /// Elements of the tensor, or of its columns where there are some.
    range: Range<usize>,
    columns: Option<Columns>,
    file: usize,
    /// Its name there.
    name: String,
}

/// Elements of a tensor in a file.
pub(super) struct Found {
    pub path: PathBuf,
    pub first: usize,
    pub elems: usize,
    /// The columns that they are elements of; all where there are none.
    pub columns: Option<Columns>,
    /// Of the file.
    pub bytes: Range<u64>,
}

impl Store {
    /// The tensors of safetensors files, each whole in one of them.
    ///
    /// # Errors
    /// When a file is not there, not safetensors, or has no checksums where there should be some; or when two
    /// have a tensor of one name.
    pub fn of_files(paths: Vec<PathBuf>, sums: Option<Manifest>) -> Result<Self, TrainError> {
        let mut store = Self { files: Vec::new(), sums, tensors: BTreeMap::new() };
        for path in paths {
            let file = store.files.len();
            store.files.push(File { path, open: None, elsewhere: None });
            let tensors = store.open(file)?;
            let named = tensors.names().map(|name| {
                let shape = tensors.shape(name).expect("it is one of the names").to_vec();
                (name.to_owned(), shape)
            });
            for (name, shape) in named.collect::<Vec<_>>() {
                let range = 0..shape.iter().product();
                let pieces = vec![Piece { range, columns: None, file, name: name.clone() }];
                if store.tensors.insert(name.clone(), Place { shape, pieces }).is_some() {
                    let message = format!("tensor `{name}` stands in another file, too; {RESTORE}");
                    return Err(TrainError::checkpoint(&store.files[file].path, message));
                }
            }
        }
        Ok(store)
    }

    /// The tensors that `layout.json` of `folder` says where to find; none where there is no such file, and no part.
    ///
    /// # Errors
    /// When it is missing beside parts, it is not as it was saved, or elements of a tensor are missing or there twice, or a file is not there;
    /// of one on several disks that is an error where something of the file is read.
    pub fn of_layout(folder: &Path, sums: Option<&Manifest>) -> Result<Option<Self>, TrainError> {
        let path = folder.join(layout::FILE);
        if !path.exists() && !layout::has_parts(folder) {
            return Ok(None);
        }
        if !path.exists() {
            let message = "is missing, and says what is in the parts that are here; put it back, or use another checkpoint";
            return Err(TrainError::checkpoint(&path, message));
        }
        if let Some(sums) = sums {
            sums.check_file(&path)?;
        }
        let layout = Layout::from_json(read_json(&path)?, &path)?;
        let mut files: BTreeMap<String, usize> = BTreeMap::new();
        let mut store = Self { files: Vec::new(), sums: sums.cloned(), tensors: BTreeMap::new() };
        for (name, tensor) in &layout.tensors {
            let mut pieces = Vec::new();
            for &layout::Stored { first, elems, ref file, columns } in &tensor.ranges {
                let next = files.len();
                let number = *files.entry(file.clone()).or_insert(next);
                if number == next {
                    let path = folder.join(file);
                    let elsewhere = (!path.exists()).then(|| layout.missing(file, folder));
                    if let (Some(message), true) = (&elsewhere, layout.disks.is_empty()) {
                        return Err(TrainError::checkpoint(&path, message.clone()));
                    }
                    store.files.push(File { path, open: None, elsewhere });
                }
                let piece = layout::Piece { tensor: name.clone(), first, elems, columns };
                let range = first..first + elems;
                pieces.push(Piece { range, columns, file: number, name: piece.name() });
            }
            store.tensors.insert(name.clone(), Place { shape: tensor.shape.clone(), pieces });
        }
        Ok(Some(store))
    }

    /// What of its files is on other disks: their names, and how to bring each.
    pub fn elsewhere(&self) -> impl Iterator<Item = (&Path, &str)> {
        let files = self.files.iter();
        files.filter_map(|file| file.elsewhere.as_deref().map(|why| (&*file.path, why)))
    }

    /// Refuses where something is on other disks.
    ///
    /// # Errors
    /// What is, and how to bring it.
    pub fn is_here(&self) -> Result<(), TrainError> {
        match self.elsewhere().next() {
            Some((path, why)) => Err(TrainError::checkpoint(path, why)),
            None => Ok(()),
        }
    }

    /// The files with elements `range` of a tensor; of columns, those with all that is in the rows.
    pub fn files_of(&self, name: &str, range: &Range<usize>) -> impl Iterator<Item = &Path> {
        let place = self.tensors.get(name);
        let width = place.and_then(|place| place.shape.last().copied()).unwrap_or(1).max(1);
        let has = move |piece: &&Piece| {
            let wanted = match piece.columns {
                None => range.clone(),
                Some([from, to]) => {
                    let own = to - from;
                    range.start / width * own..range.end.div_ceil(width) * own
                }
            };
            piece.range.start < wanted.end && wanted.start < piece.range.end
        };
        let pieces = place.map_or(&[][..], |place| &place.pieces);
        pieces.iter().filter(has).map(|piece| &*self.files[piece.file].path)
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor that is here.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|place| &*place.shape)
    }

    /// Reads all that is here of a tensor, and holds it to its checksums.
    ///
    /// # Errors
    /// If something is damaged, or has a value that is not finite.
    pub fn verify(&mut self, name: &str) -> Result<(), TrainError> {
        let pieces = self.tensors.get(name).map_or(&[][..], |place| &place.pieces);
        let pieces = pieces.iter().map(|piece| (piece.file, piece.name.clone(), piece.range.len()));
        for (file, name, elems) in pieces.collect::<Vec<_>>() {
            if self.files[file].elsewhere.is_none() {
                self.open(file)?.read_part(&name, elems, 0..elems, &mut |_| Ok(()))?;
            }
        }
        Ok(())
    }

    /// The dtype of a tensor, and where its elements that are here are.
    ///
    /// # Errors
    /// When a file cannot be opened or has not what it should have.
    pub fn find(&mut self, name: &str) -> Result<(String, Vec<Found>), TrainError> {
        let place = self.tensors.get(name).map_or(&[][..], |place| &place.pieces);
        let pieces = place.iter().map(|p| (p.file, p.name.clone(), p.range.clone(), p.columns));
        let (mut all, mut dtype) = (Vec::new(), String::new());
        for (file, name, Range { start: first, end }, columns) in pieces.collect::<Vec<_>>() {
            if self.files[file].elsewhere.is_some() {
                dtype = layout::DTYPE.to_owned();
                continue;
            }
            let tensors = self.open(file)?;
            let Some((tag, bytes)) = tensors.place(&name) else {
                let message = format!("tensor `{name}` is missing");
                return Err(TrainError::checkpoint(&self.files[file].path, message));
            };
            dtype = tag.to_owned();
            let path = self.files[file].path.clone();
            all.push(Found { path, first, elems: end - first, columns, bytes });
        }
        Ok((dtype, all))
    }

    /// The file of a tensor's first element, or any.
    pub fn path(&self, name: &str) -> &Path {
        let place = self.tensors.get(name).and_then(|place| place.pieces.first());
        &self.files[place.map_or(0, |piece| piece.file)].path
    }

    /// Gives the elements `range` of a tensor of `elems`, in pieces, to `put`.
    ///
    /// # Errors
    /// If it is missing, of another size, damaged, or has a value that is not finite; and what `put` returns.
    pub fn read(
        &mut self,
        name: &str,
        elems: usize,
        range: Range<usize>,
        put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let refuse = |path: &Path, message: String| Err(TrainError::checkpoint(path, message));
        let Some(place) = self.tensors.get(name) else {
            return refuse(self.path(name), format!("tensor `{name}` is missing"));
        };
        if place.shape.iter().product::<usize>() != elems {
            let shape = &place.shape;
            let message = format!("tensor `{name}` has shape {shape:?}, not {elems} elements");
            return refuse(self.path(name), message);
        }
        let mut slabs: Vec<Option<Columns>> =
            place.pieces.iter().map(|piece| piece.columns).collect();
        slabs.dedup();
        if matches!(slabs[..], [] | [None]) {
            return self.read_slab(name, None, range, put);
        }
        // Some rows at a time, of which each slab has its columns.
        let width = place.shape[1];
        let rows_at_once = (layout::PIECE / width.max(1)).max(1);
        let mut row = range.start / width;
        while row * width < range.end {
            let end = (row + rows_at_once).min(range.end.div_ceil(width));
            let mut rows = vec![0.0; (end - row) * width];
            for &columns in &slabs {
                let [from, to] = columns.unwrap_or([0, width]);
                let (own, mut at) = (to - from, 0);
                self.read_slab(name, columns, row * own..end * own, &mut |mut values| {
                    while !values.is_empty() {
                        let (line, column) = (at / own, at % own);
                        let (some, rest) = values.split_at(values.len().min(own - column));
                        let into = line * width + from + column;
                        rows[into..into + some.len()].copy_from_slice(some);
                        (at, values) = (at + some.len(), rest);
                    }
                    Ok(())
                })?;
            }
            let here = range.start.max(row * width)..range.end.min(end * width);
            put(&rows[here.start - row * width..here.end - row * width])?;
            row = end;
        }
        Ok(())
    }

    /// Gives elements `range` of the columns of a tensor, or of all of it, to `put`.
    fn read_slab(
        &mut self,
        name: &str,
        columns: Option<Columns>,
        range: Range<usize>,
        put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let overlap = |piece: &Piece| {
            let (start, end) = (range.start.max(piece.range.start), range.end.min(piece.range.end));
            let part =
                start.saturating_sub(piece.range.start)..end.saturating_sub(piece.range.start);
            let is_here = piece.columns == columns && start < end;
            is_here.then(|| (piece.file, piece.name.clone(), piece.range.len(), part))
        };
        let pieces = self.tensors.get(name).map_or(&[][..], |place| &place.pieces);
        let parts: Vec<_> = pieces.iter().filter_map(overlap).collect();
        for (file, name, elems, part) in parts {
            self.open(file)?.read_part(&name, elems, part, put)?;
        }
        Ok(())
    }

    fn open(&mut self, file: usize) -> Result<&mut Tensors, TrainError> {
        let File { path, open, elsewhere } = &mut self.files[file];
        if open.is_none() {
            if let Some(why) = elsewhere {
                return Err(TrainError::checkpoint(path, why.clone()));
            }
            let tensors = Tensors::open(path)?;
            *open = Some(match &self.sums {
                Some(sums) => tensors.verified_by(sums.tensors(path)?),
                None => tensors,
            });
        }
        Ok(open.as_mut().expect("set above"))
    }
}
