//! Layouts in the words of others: JAX's `PartitionSpec` and DTensor's placements.
//!
//! Both say less than a [`ShardLayout`]: no stored lengths and no order of tokens. What cannot be
//! said is refused when it is written; what is read becomes the layout that they mean.

use foveate::tensor::ElementType;

use crate::error::{ShardError, refused};
use crate::layout::{Cut, CutAxis, ShardLayout};
use crate::map::Axis;
use crate::mesh::{Mesh, MeshAxis};

/// The names, lengths and element type that neither of the two forms holds.
#[derive(Clone, Copy, Debug)]
pub struct ArrayOf<'a> {
    /// Type of the elements.
    pub element: ElementType,
    /// Names of the axes.
    pub axes: &'a [Axis],
    /// Lengths of the whole array.
    pub shape: &'a [usize],
}

impl ArrayOf<'_> {
    fn check(&self) -> Result<(), ShardError> {
        if self.axes.len() == self.shape.len() {
            return Ok(());
        }
        let (names, lengths) = (self.axes.len(), self.shape.len());
        refused(format!("an array has {names} names of axes but {lengths} lengths; give one each"))
    }

    fn layout(
        &self,
        on: Vec<Vec<MeshAxis>>,
        cut: impl Fn(usize, usize, &[MeshAxis]) -> Result<Cut, ShardError>,
    ) -> Result<ShardLayout, ShardError> {
        let mut axes = Vec::new();
        for (i, on) in on.into_iter().enumerate() {
            let cut = cut(i, self.shape[i], &on)?;
            axes.push(CutAxis { axis: self.axes[i], on, cut });
        }
        Ok(ShardLayout { element: self.element, axes, order: None })
    }
}

/// A layout as JAX's `PartitionSpec`, such as `P(('replicate', 'shard'), 'context', None)`.
///
/// # Errors
/// When the parts of an axis differ or are copies, which JAX has no words for, or tokens are in the order
/// of a permutation.
pub fn to_partition_spec(layout: &ShardLayout) -> Result<String, ShardError> {
    in_reading_order(layout, "PartitionSpec")?;
    let mut entries = Vec::new();
    for axis in &layout.axes {
        let lengths = axis.cut.lengths();
        if lengths.iter().any(|&n| n != lengths[0]) {
            return refused(format!(
                "axis {} has parts of {lengths:?}, and a PartitionSpec means equal ones; pad it to a \
                 multiple of {}",
                axis.axis,
                lengths.len()
            ));
        }
        if lengths.iter().sum::<usize>() != axis.cut.len() {
            return refused(format!(
                "axis {} is copied to several of {} ranks, which a PartitionSpec has no words for",
                axis.axis,
                lengths.len()
            ));
        }
        entries.push(match axis.on.as_slice() {
            [] => "None".to_owned(),
            [one] => format!("'{one}'"),
            several => {
                let names: Vec<_> = several.iter().map(|a| format!("'{a}'")).collect();
                format!("({})", names.join(", "))
            }
        });
    }
    Ok(format!("P({})", entries.join(", ")))
}

/// The layout that a `PartitionSpec` means on a mesh with axes of our names. Axes that it leaves out
/// at the end are whole, as in JAX.
///
/// # Errors
/// When it is no spec, names an axis that the mesh has not, names one twice, has more entries than
/// the array has axes, or an axis does not divide.
pub fn from_partition_spec(
    text: &str,
    array: ArrayOf<'_>,
    mesh: &Mesh,
) -> Result<ShardLayout, ShardError> {
    array.check()?;
    let wrong = |why: String| ShardError::new(format!("PartitionSpec `{text}`: {why}"));
    let inner = ["PartitionSpec(", "P("].into_iter().find_map(|p| text.trim().strip_prefix(p));
    let inner = inner.and_then(|rest| rest.strip_suffix(')'));
    let inner = inner.ok_or_else(|| wrong("it is not P(…)".to_owned()))?;
    let mut on: Vec<Vec<MeshAxis>> = Vec::new();
    for entry in entries(inner).map_err(wrong)? {
        let names = match entry.as_str() {
            "None" | "()" => vec![],
            entry => {
                let tuple = entry.strip_prefix('(').and_then(|e| e.strip_suffix(')'));
                let names = tuple.unwrap_or(entry).split(',').map(str::trim);
                names.filter(|n| !n.is_empty()).map(str::to_owned).collect::<Vec<_>>()
            }
        };
        let mut axes = Vec::new();
        for name in names {
            let bare = name.trim_matches(['\'', '"']);
            axes.push(MeshAxis::parse(bare).map_err(|e| wrong(e.to_string()))?);
        }
        on.push(axes);
    }
    if on.len() > array.axes.len() {
        let (given, axes) = (on.len(), array.axes.len());
        return Err(wrong(format!("it has {given} entries for an array of {axes} axes")));
    }
    on.resize(array.axes.len(), vec![]);
    once_and_in_order(&mut on, mesh).map_err(wrong)?;
    array.layout(on, |i, len, on| {
        let parts = mesh.size_of(on);
        if !len.is_multiple_of(parts) {
            let axis = array.axes[i];
            return Err(wrong(format!("{axis} of {len} does not divide by {parts}, as JAX needs")));
        }
        Ok(Cut::even(len, parts))
    })
}

/// A layout as DTensor's placements, one for each axis of the mesh in its order, such as
/// `[Replicate(), Shard(0), Shard(1), Replicate()]`.
///
/// # Errors
/// When the parts are not those of `torch.chunk`, or tokens are in the order of a permutation.
pub fn to_dtensor(layout: &ShardLayout, mesh: &Mesh) -> Result<String, ShardError> {
    in_reading_order(layout, "DTensor placement")?;
    for axis in &layout.axes {
        let chunks = torch_chunks(axis.cut.len(), mesh, &axis.on);
        if axis.cut != chunks {
            return refused(format!(
                "axis {} has parts of {:?}, and DTensor means {:?}; cut it so",
                axis.axis,
                axis.cut.lengths(),
                chunks.lengths()
            ));
        }
    }
    let placement = |m: &MeshAxis| match layout.axes.iter().position(|a| a.on.contains(m)) {
        Some(i) => format!("Shard({i})"),
        None => "Replicate()".to_owned(),
    };
    Ok(format!("[{}]", MeshAxis::ALL.iter().map(placement).collect::<Vec<_>>().join(", ")))
}

/// The layout that DTensor's placements mean on a mesh of four axes in our order.
///
/// # Errors
/// When there are not four, one is none or a `Partial`, which is a sum that is not finished, or an
/// axis is not there.
pub fn from_dtensor(
    text: &str,
    array: ArrayOf<'_>,
    mesh: &Mesh,
) -> Result<ShardLayout, ShardError> {
    array.check()?;
    let wrong = |why: String| ShardError::new(format!("placements `{text}`: {why}"));
    let inner = text.trim();
    let inner = inner.strip_prefix(['[', '(']).and_then(|rest| rest.strip_suffix([']', ')']));
    let inner = inner.ok_or_else(|| wrong("they are not [… , …]".to_owned()))?;
    let placements = entries(inner).map_err(wrong)?;
    if placements.len() != 4 {
        let n = placements.len();
        return Err(wrong(format!("there are {n}; give one for each axis of the mesh, 4")));
    }
    let mut on = vec![vec![]; array.axes.len()];
    for (placement, m) in placements.iter().zip(MeshAxis::ALL) {
        if placement == "Replicate()" {
            continue;
        }
        let shard = placement.strip_prefix("Shard(").and_then(|p| p.strip_suffix(')'));
        let dim = shard.map(|d| d.trim().trim_start_matches("dim=").parse::<usize>());
        match dim {
            Some(Ok(dim)) if dim < array.axes.len() => on[dim].push(m),
            Some(Ok(dim)) => {
                let axes = array.axes.len();
                return Err(wrong(format!("{m} cuts axis {dim} of an array of {axes}")));
            }
            _ if placement.starts_with("Partial") => {
                return Err(wrong(format!("{m} holds parts of a sum; reduce them first")));
            }
            _ => return Err(wrong(format!("`{placement}` is neither Shard(i) nor Replicate()"))),
        }
    }
    once_and_in_order(&mut on, mesh).map_err(wrong)?;
    array.layout(on, |_, len, on| Ok(torch_chunks(len, mesh, on)))
}

/// The parts that DTensor makes: `torch.chunk` along each mesh axis in turn, whose chunks are
/// `ceil(len / parts)` long while there is something left.
fn torch_chunks(len: usize, mesh: &Mesh, on: &[MeshAxis]) -> Cut {
    let mut lengths = vec![len];
    for &m in on {
        let parts = mesh.size(m);
        let chunk = |len: usize| {
            let each = len.div_ceil(parts);
            (0..parts).map(move |i| len.min((i + 1) * each) - len.min(i * each))
        };
        lengths = lengths.into_iter().flat_map(chunk).collect();
    }
    Cut::of_lengths(&lengths).expect("there is a part, and they add up to a length")
}

fn in_reading_order(layout: &ShardLayout, form: &str) -> Result<(), ShardError> {
    match layout.order {
        None => Ok(()),
        Some(id) => refused(format!(
            "{layout} has tokens in order {id}, which no {form} can say; undo the permutation first"
        )),
    }
}

/// Checks that no mesh axis is there twice and that those of an axis are in the mesh's order, then
/// leaves out those of size 1.
fn once_and_in_order(on: &mut [Vec<MeshAxis>], mesh: &Mesh) -> Result<(), String> {
    let mut used = Vec::new();
    for axes in on {
        if !axes.is_sorted() {
            return Err("an axis is cut over mesh axes in another order than the mesh's".to_owned());
        }
        for &m in axes.iter() {
            if used.contains(&m) {
                return Err(format!("{m} is there twice"));
            }
            used.push(m);
        }
        axes.retain(|&m| mesh.size(m) > 1);
    }
    Ok(())
}

/// What stands between the commas outside of brackets.
fn entries(text: &str) -> Result<Vec<String>, String> {
    let (mut entries, mut depth, mut entry) = (Vec::new(), 0usize, String::new());
    for c in text.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1).ok_or("a bracket closes that none opened")?,
            ',' if depth == 0 => {
                entries.push(std::mem::take(&mut entry).trim().to_owned());
                continue;
            }
            _ => {}
        }
        entry.push(c);
    }
    if depth > 0 {
        return Err("a bracket is not closed".to_owned());
    }
    if !entry.trim().is_empty() {
        entries.push(entry.trim().to_owned());
    }
    Ok(entries)
}
