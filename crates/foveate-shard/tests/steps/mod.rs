//! Small models whose steps are planned.

use std::ops::Range;

use foveate::tensor::{ElementType, random::Random};
use foveate_shard::step::{Again, CopiedElements, Copies, GroupShape, Stays, StepShape};
use foveate_shard::{Axis, Lengths, Map, Mesh, Sharding};

pub struct Model {
    pub layers: usize,
    pub kv_heads: usize,
    pub tied: bool,
    pub rows: usize,
    pub len: usize,
}

pub fn lengths(of: &Model) -> Lengths {
    Lengths {
        batch: of.rows,
        seq: of.len,
        kv_seq: of.len,
        heads: 2 * of.kv_heads,
        kv_heads: of.kv_heads,
        dim: 4,
        dim_v: 4,
        hidden: 16,
        ffn: 27,
        vocab: 50,
    }
}

/// Products of a layer that are computed again, at random.
pub fn again(random: &mut Random) -> Again {
    let mut flip = || random.below(2) == 0;
    let (qkv, gate_up) = (flip(), flip());
    Again { qkv, out: qkv && flip(), gate_up, down: gate_up && flip() }
}

pub fn model(map: Map, of: &Model) -> Sharding {
    Sharding::new(map, &lengths(of)).unwrap()
}

pub fn sharding(mesh: [usize; 4], of: &Model) -> Sharding {
    model(Map::new(Mesh::new(mesh).unwrap()), of)
}

/// Groups whose sizes differ by place on `tensor`; where there are several places, a norm and a bias by head
/// are copied, and key/value heads where these are fewer than ranks.
pub fn shape(sharding: &Sharding, of: &Model) -> StepShape {
    let parts = sharding.map().parts(Axis::Heads);
    let group = |name: String, tensor: usize, [trained, frozen]: [usize; 2], layer: bool| {
        // They lie elsewhere where other things before them are larger.
        let at = tensor % 2;
        let copied = |elements: Range<usize>, among, of| {
            let elements = elements.start + at..elements.end + at;
            CopiedElements { elements, among, of }
        };
        let mut all = vec![];
        if parts > 1 && layer {
            all.push(copied(0..5, Copies::All, Axis::Stream));
            all.push(copied(8..11, Copies::All, Axis::Heads));
            if sharding.cut(Axis::KvHeads).copies(tensor).len() > 1 {
                all.push(copied(12..15, Copies::KvHeads, Axis::Heads));
            }
        }
        GroupShape { name, trained: trained + tensor % 2, frozen, copied: all }
    };
    let groups = |tensor| {
        let mut groups = vec![group("embedding".into(), tensor, [33, 0], false)];
        let layer = |i: usize| group(format!("layers.{i}"), tensor, [40 + i, 3 * (i % 2)], true);
        groups.extend((0..of.layers).map(layer));
        groups.push(group("head".into(), tensor, [20, 2], false));
        groups
    };
    StepShape {
        groups: (0..parts).map(groups).collect(),
        block: 4,
        tied: of.tied,
        stays: Stays::Layer,
        again: vec![Again::default(); of.layers],
        batches: 1,
        in_backward: false,
        weights: ElementType::BF16,
        reduces: ElementType::F32,
    }
}
