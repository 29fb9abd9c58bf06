//! Meshes, maps, layouts and permutations against brute force.

use foveate::tensor::ElementType;
use foveate::tensor::random::Random;
use foveate_shard::interchange::{
    ArrayOf, from_dtensor, from_partition_spec, to_dtensor, to_partition_spec,
};
use foveate_shard::{
    Axis, Cut, Lengths, Map, Mesh, MeshAxis, Permutation, ShardLayout, Sharded, Sharding, arrays,
};
use proptest::prelude::*;

fn lengths(batch: usize, seq: usize, kv_heads: usize) -> Lengths {
    Lengths {
        batch,
        seq,
        kv_seq: seq + 3,
        heads: 3 * kv_heads,
        kv_heads,
        dim: 8,
        dim_v: 4,
        hidden: 24,
        ffn: 40,
        vocab: 101,
    }
}

fn meshes() -> impl Strategy<Value = Mesh> {
    (1..4usize, 1..4usize, 1..5usize, 1..4usize)
        .prop_map(|(r, s, c, t)| Mesh::new([r, s, c, t]).unwrap())
}

fn told<T: std::fmt::Debug>(result: Result<T, foveate_shard::ShardError>) -> String {
    result.expect_err("it is refused").to_string()
}

proptest! {
    #[test]
    fn ranks_and_places_are_one_to_one_and_groups_part_the_mesh(mesh in meshes(), axis in 0..4usize) {
        let mut rank = 0;
        for r in 0..mesh.size(MeshAxis::Replicate) {
            for s in 0..mesh.size(MeshAxis::Shard) {
                for c in 0..mesh.size(MeshAxis::Context) {
                    for t in 0..mesh.size(MeshAxis::Tensor) {
                        prop_assert_eq!(mesh.place(rank), [r, s, c, t]);
                        prop_assert_eq!(mesh.rank_at([r, s, c, t]), Some(rank));
                        rank += 1;
                    }
                }
            }
        }
        prop_assert_eq!(rank, mesh.ranks());
        let axis = MeshAxis::ALL[axis];
        for rank in 0..mesh.ranks() {
            let group = mesh.group(rank, &[axis]);
            prop_assert_eq!(group.len(), mesh.size(axis));
            prop_assert_eq!(group[mesh.index(rank, axis)], rank);
        }
    }

    /// For every array, each element is on the ranks whose place on the mesh axes of each of its
    /// names is that of the element's part, and on no other: counted element by element.
    #[test]
    fn every_element_is_where_the_map_sends_it(
        mesh in meshes(), batch in 0..7usize, seq in 0..9usize, heads in 3..6usize, elements in 0..40usize,
    ) {
        let sharding = Sharding::new(Map::new(mesh), &lengths(batch, seq, heads)).unwrap();
        let sharding = sharding.with_length(Axis::Elements, elements);
        let map = sharding.map();
        for array in arrays::ATTENTION.iter().chain(arrays::MODEL) {
            let layout = array.layout(&sharding).unwrap();
            let copies = mesh.ranks() / layout.axes().iter().map(|a| a.cut.parts()).product::<usize>();
            let mut held = 0;
            for rank in 0..mesh.ranks() {
                let ranges = layout.ranges(map, rank);
                held += ranges.iter().map(|r| r.len()).product::<usize>();
                for (axis, range) in array.axes.iter().zip(ranges) {
                    // The parts before this one, by the ranks' places, hold what is before it.
                    let part = map.part(*axis, rank);
                    let before: usize = sharding.cut(*axis).lengths()[..part].iter().sum();
                    prop_assert_eq!(range.start, before, "{} of {} on {}", axis, array.name, rank);
                }
            }
            prop_assert_eq!(held, copies * layout.shape().iter().product::<usize>(), "{}", array.name);
        }
        // A query head lies with its key/value head.
        for rank in 0..mesh.ranks() {
            let (q, kv) = (sharding.range(Axis::Heads, rank), sharding.range(Axis::KvHeads, rank));
            prop_assert_eq!((kv.start * 3, kv.end * 3), (q.start, q.end));
        }
    }

    /// Fewer key/value heads than ranks: each rank has one, ranks of one have its query heads once.
    #[test]
    fn key_value_heads_that_are_fewer_than_ranks_are_copied(
        kv_heads in 1..6usize, group in 1..6usize, tensor in 1..20usize, context in 1..4usize,
    ) {
        let heads = kv_heads * group;
        let mesh = Mesh::new([1, 1, context, tensor]).unwrap();
        let lengths = Lengths { heads, kv_heads, ..lengths(1, 13, 1) };
        let sharding = Sharding::new(Map::new(mesh), &lengths);
        if heads < tensor {
            let plural = if heads == 1 { "" } else { "s" };
            let start = format!("{heads} query head{plural} cannot be cut over");
            let told = told(sharding);
            prop_assert!(told.starts_with(&start), "{}", told);
            return Ok(());
        }
        let sharding = sharding.unwrap();
        if kv_heads < tensor {
            let k = arrays::by_name("k").unwrap().layout(&sharding).unwrap();
            let refused = told(to_partition_spec(&k));
            prop_assert!(refused.contains("kv_heads is copied") || refused.contains("parts of"), "{}", refused);
        }
        let mut holders = vec![0; heads];
        let mut tokens = [0; 13];
        for rank in 0..mesh.ranks() {
            let (q, kv) = (sharding.range(Axis::Heads, rank), sharding.range(Axis::KvHeads, rank));
            prop_assert!(!q.is_empty() && !kv.is_empty());
            prop_assert!(kv.start * group <= q.start && q.end <= kv.end * group);
            prop_assert!(kv.len() == 1 || q.len() == kv.len() * group);
            q.for_each(|h| holders[h] += 1);
            let (seq, stream) = (sharding.range(Axis::Seq, rank), sharding.range(Axis::Stream, rank));
            prop_assert!(stream.is_empty() || seq.start <= stream.start && stream.end <= seq.end);
            stream.for_each(|at| tokens[at] += 1);
            let part = sharding.map().part(Axis::KvHeads, rank);
            let copies = sharding.cut(Axis::KvHeads).copies(part);
            prop_assert!(copies.contains(&part) && (kv_heads < tensor || copies.len() == 1));
        }
        prop_assert!(holders.iter().all(|&n| n == context));
        prop_assert!(tokens.iter().all(|&n| n == 1));
    }

    #[test]
    fn even_parts_differ_by_one_and_add_up(len in 0..1000usize, parts in 1..40usize) {
        let cut = Cut::even(len, parts);
        prop_assert_eq!(cut.len(), len);
        let lengths = cut.lengths();
        prop_assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
        prop_assert_eq!(Cut::of_lengths(&lengths).unwrap(), cut);
    }

    /// Placements name the part that `torch.chunk`, applied for each mesh axis, gives each rank.
    #[test]
    fn placements_and_specs_are_read_as_they_are_written(
        mesh in meshes(), unit in (1..4usize, 1..4usize), uneven in 0..30usize,
    ) {
        let of = |layout: &ShardLayout| {
            (layout.axes().iter().map(|a| a.axis).collect::<Vec<_>>(), layout.shape())
        };
        let whole = mesh.ranks();
        let sharding =
            Sharding::new(Map::new(mesh), &lengths(unit.0 * whole, unit.1 * whole, 4 * whole)).unwrap();
        for array in arrays::ATTENTION.iter().chain(arrays::MODEL) {
            let layout = array.layout(&sharding).unwrap();
            let (axes, shape) = of(&layout);
            let array = ArrayOf { element: array.element, axes: &axes, shape: &shape };
            if let Ok(spec) = to_partition_spec(&layout) {
                prop_assert_eq!(&from_partition_spec(&spec, array, &mesh).unwrap(), &layout, "{}", spec);
            }
            if let Ok(placements) = to_dtensor(&layout, &mesh) {
                prop_assert_eq!(&from_dtensor(&placements, array, &mesh).unwrap(), &layout);
            }
        }
        let axes = [Axis::Batch];
        let array = ArrayOf { element: ElementType::I32, axes: &axes, shape: &[uneven] };
        let text = "[Shard(0), Shard(dim=0), Replicate(), Replicate()]";
        let layout = from_dtensor(text, array, &mesh).unwrap();
        let chunk = |all: &[usize], parts: usize, i: usize| -> Vec<usize> {
            let each = all.len().div_ceil(parts).max(1);
            all.chunks(each).nth(i).unwrap_or(&[]).to_vec()
        };
        let all: Vec<usize> = (0..uneven).collect();
        for rank in 0..mesh.ranks() {
            let [r, s, ..] = mesh.place(rank);
            let outer = chunk(&all, mesh.size(MeshAxis::Replicate), r);
            let own = chunk(&outer, mesh.size(MeshAxis::Shard), s);
            let range = layout.ranges(&Map::new(mesh), rank).remove(0);
            prop_assert_eq!(range.collect::<Vec<_>>(), own);
        }
    }

    #[test]
    fn a_permutation_is_undone_by_its_inverse(cuts in prop::collection::vec(0..20usize, 1..12), seed in any::<u64>()) {
        let cut = Cut::of_lengths(&cuts).unwrap();
        let mut ranges: Vec<_> = (0..cut.parts()).map(|i| cut.range(i)).collect();
        let mut random = Random::new(seed);
        for i in (1..ranges.len()).rev() {
            ranges.swap(i, random.below(i + 1));
        }
        let order: Vec<usize> = ranges.iter().cloned().flatten().collect();
        let permutation = Permutation::new(ranges, cut.len()).unwrap();
        let row: Vec<usize> = (0..2 * cut.len()).collect();
        let moved = permutation.apply(&row, 2);
        for (new, old) in order.iter().enumerate() {
            prop_assert_eq!(&moved[2 * new..2 * new + 2], &[2 * old, 2 * old + 1]);
        }
        let inverse = permutation.inverse();
        prop_assert_eq!(inverse.apply(&moved, 2), row);
        prop_assert_eq!(inverse.inverse().id(), permutation.id());
        prop_assert_eq!(permutation.id() == Permutation::identity(cut.len()).id(), order.is_sorted());
        for start in 0..cut.len() {
            let end = cut.len().min(start + 7);
            let found: Vec<usize> = permutation.positions(start..end).into_iter().flatten().collect();
            prop_assert_eq!(&found[..], &order[start..end]);
        }
    }
}

#[test]
fn a_layout_prints_as_jax_prints_types() {
    let mesh = Mesh::new([2, 2, 4, 1]).unwrap();
    let sharding = Sharding::new(Map::new(mesh), &lengths(8, 64, 2)).unwrap();
    let print = |name: &str| arrays::by_name(name).unwrap().layout(&sharding).unwrap().to_string();
    assert_eq!(print("residual"), "bf16[batch@(replicate,shard), stream@context, hidden]");
    assert_eq!(print("masters"), "f32[elements@(shard,context)]");
    assert_eq!(print("q"), "bf16[batch@(replicate,shard), heads, seq@context, dim]");
    assert_eq!(print("metrics"), "f32[]");
    let residual = arrays::by_name("residual").unwrap().layout(&sharding).unwrap();
    assert_eq!(to_partition_spec(&residual).unwrap(), "P(('replicate', 'shard'), 'context', None)");
    let placements = to_dtensor(&residual, &mesh).unwrap();
    assert_eq!(placements, "[Shard(0), Shard(0), Shard(1), Replicate()]");
}

#[test]
fn an_array_with_another_layout_is_refused_by_operand_and_axis() {
    let mesh = Mesh::new([1, 2, 2, 2]).unwrap();
    let sharding = Sharding::new(Map::new(mesh), &lengths(4, 10, 2)).unwrap();
    let documents = arrays::by_name("documents").unwrap().layout(&sharding).unwrap();
    // PR 8333 of pytorch/xla: the spec of q cut by position puts heads' mesh axis on the tokens.
    let shape = documents.shape();
    let array =
        ArrayOf { element: ElementType::I32, axes: &[Axis::Batch, Axis::Seq], shape: &shape };
    let by_position = from_partition_spec("P('shard', 'tensor')", array, &mesh).unwrap();
    let message = told(documents.expect("documents", &by_position));
    let expected = "operand `documents`, axis seq: expected seq@context, found seq@tensor;";
    assert!(message.starts_with(expected), "{message}");
    let whole = from_partition_spec("P()", array, &mesh).unwrap();
    assert!(
        told(documents.expect("documents", &whole)).contains("axis batch: expected batch@shard")
    );
    let uneven = sharding.clone().with_cut(Axis::Seq, Cut::of_lengths(&[4, 6]).unwrap()).unwrap();
    let uneven = arrays::by_name("documents").unwrap().layout(&uneven).unwrap();
    let message = told(documents.expect("documents", &uneven));
    assert!(message.contains("expected parts of [5, 5], found parts of [4, 6]"), "{message}");
    let order = Permutation::new(vec![5..10, 0..5], 10).unwrap().id();
    let moved =
        arrays::by_name("documents").unwrap().layout(&sharding.clone().in_order(Some(order)));
    let message = told(documents.expect("documents", &moved.clone().unwrap()));
    assert!(message.contains(&format!("found tokens in order {order}")), "{message}");
    assert!(told(to_partition_spec(&moved.unwrap())).contains("undo the permutation first"));
    let floats = sharding.layout(ElementType::BF16, &[Axis::Batch, Axis::Seq]).unwrap();
    assert!(told(documents.expect("documents", &floats)).contains("expected i32, found bf16"));
    documents.expect("documents", &documents.clone()).unwrap();

    let part = |shape: &[usize], rank| {
        Sharded::new("documents", (), shape, documents.clone(), sharding.map(), rank).map(|_| ())
    };
    part(&[2, 5], 7).unwrap();
    assert!(told(part(&[2, 10], 3)).contains("axis seq on rank 3: expected a part of 5, found 10"));
    assert!(told(part(&[2], 0)).contains("has 1 axes"));
}

#[test]
fn what_cannot_be_is_refused_in_one_line() {
    let mesh = |text, ranks| told(Mesh::parse(text, ranks));
    assert!(mesh("context=3", 8).contains("has 3 ranks, but 8 run"));
    assert!(mesh("context=3,shard=auto", 8).contains("8 ranks cannot be divided by 3"));
    assert!(mesh("shard=auto,context=auto", 8).contains("only one axis can be auto"));
    assert!(mesh("context=2,context=4", 8).contains("given twice"));
    assert!(mesh("pipeline=2", 2).contains("`pipeline` is no axis of a mesh"));
    assert!(mesh("context=0", 2).contains("size `0`"));
    assert!(mesh("context", 2).contains("not axis=size"));
    for nothing in ["", " , "] {
        assert!(mesh(nothing, 1).contains("no axis is given"), "{nothing:?}");
    }
    assert!(
        mesh("shard=99999999999,context=99999999999,tensor=auto", 8).contains("cannot be divided")
    );
    assert!(told(Mesh::parse_whole("context=auto")).contains("context is auto"));
    assert!(
        told(Mesh::new([1, 1 << 40, 1 << 40, 1]))
            .ends_with("has more than 65536 ranks; give smaller sizes")
    );

    let map = Map::new(Mesh::new([1, 2, 2, 2]).unwrap());
    let to = |axis, axes: &[MeshAxis]| told(map.clone().with(axis, axes));
    assert!(to(Axis::Dim, &[MeshAxis::Tensor]).contains("dim is whole on every rank"));
    let twice = to(Axis::Batch, &[MeshAxis::Shard, MeshAxis::Shard]);
    assert!(twice.contains("give each mesh axis once"), "{twice}");
    let clash = map.clone().with(Axis::Heads, &[MeshAxis::Context]).unwrap();
    assert_eq!(clash.of(Axis::KvHeads), [MeshAxis::Context], "they go together");
    let sharding = Sharding::new(clash, &lengths(2, 8, 2)).unwrap();
    let message = told(arrays::by_name("q").unwrap().layout(&sharding));
    assert!(message.contains("cut twice over context, by heads and by seq"), "{message}");
    let many = Map::new(Mesh::new([1, 1, 1, 4]).unwrap());
    let few = told(Sharding::new(many, &lengths(2, 8, 1)));
    assert_eq!(few, "3 query heads cannot be cut over 4 ranks; use 3 ranks or fewer on tensor");
    let cut = Sharding::new(map, &lengths(2, 8, 2)).unwrap().with_cut(Axis::Seq, Cut::even(8, 3));
    assert!(told(cut).contains("3 parts, but the map sends it to 2 ranks"));

    assert!(told(Permutation::new(vec![0..4, 3..8], 8)).contains("3..4 are in two ranges"));
    assert!(told(Permutation::new(vec![0..4, 5..8], 8)).contains("4..5 are in no range"));
    assert!(told(Permutation::new(vec![0..2, 2..4], 8)).contains("end at 4"));

    let mesh = Mesh::new([1, 2, 2, 1]).unwrap();
    let axes = [Axis::Batch, Axis::Seq];
    let array = ArrayOf { element: ElementType::I32, axes: &axes, shape: &[4, 7] };
    let spec = |text| told(from_partition_spec(text, array, &mesh));
    assert!(spec("P('shard', 'context')").contains("seq of 7 does not divide by 2"));
    assert!(spec("P('shard', 'shard')").contains("shard is there twice"));
    assert!(spec("P(('context', 'shard'))").contains("another order"));
    assert!(spec("P('data')").contains("`data` is no axis of a mesh"));
    assert!(spec("P(None, None, None)").contains("3 entries for an array of 2 axes"));
    assert!(spec("P((").contains("not P("));
    assert!(spec("P(()").contains("not closed"));
    let placed = |text| told(from_dtensor(text, array, &mesh));
    assert!(placed("[Partial(), Shard(0), Shard(1), Replicate()]").contains("reduce them first"));
    assert!(placed("[Shard(0)]").contains("there are 1"));
    assert!(
        placed("[Shard(2), Replicate(), Replicate(), Replicate()]").contains("axis 2 of an array")
    );
    let uneven = Sharding::new(Map::new(mesh), &lengths(5, 7, 2)).unwrap();
    let uneven = uneven.layout(ElementType::I32, &axes).unwrap();
    assert!(told(to_partition_spec(&uneven)).contains("pad it to a multiple of 2"));
}

#[test]
fn a_group_has_the_ranks_that_differ_on_its_axes_alone() {
    let mesh = Mesh::new([2, 3, 4, 2]).unwrap();
    for chosen in 0..16 {
        let is_chosen = |axis: &MeshAxis| chosen >> *axis as usize & 1 == 1;
        let axes: Vec<MeshAxis> = MeshAxis::ALL.into_iter().filter(is_chosen).collect();
        for rank in 0..mesh.ranks() {
            let alike = |other: &usize| {
                let (one, other) = (mesh.place(rank), mesh.place(*other));
                MeshAxis::ALL.iter().all(|a| is_chosen(a) || one[*a as usize] == other[*a as usize])
            };
            let expected: Vec<usize> = (0..mesh.ranks()).filter(alike).collect();
            assert_eq!(mesh.group(rank, &axes), expected, "{axes:?} of rank {rank}");
        }
    }
}

#[test]
fn an_axis_of_another_name_is_refused_with_the_name_and_those_there_are() {
    for axis in Axis::ALL {
        assert_eq!(Axis::parse(axis.name()).unwrap(), axis);
    }
    let told = Axis::parse("buckets").unwrap_err().to_string();
    assert!(told.starts_with("`buckets` is no name of an axis; batch, seq, "), "{told}");
    assert!(told.contains("captured"), "{told}");
    // Whatever the axes of a captured buffer mean, it is whole.
    let map = Map::new(Mesh::new([1, 2, 1, 2]).unwrap());
    let told = map.with(Axis::Captured, &[MeshAxis::Tensor]).unwrap_err().to_string();
    let why = "captured is whole on every rank, because mods read captured buffers in global";
    assert!(told.contains(why), "{told}");
}
