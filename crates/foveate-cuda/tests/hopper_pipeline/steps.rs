//! What the two kernels of a backward have in common that share a product less than `backward.cu`
//! with others: dQ alone, and dK and dV of wide head dims. A kernel says what its roles do; here is what
//! they walk (`kernels/hopper/backward_steps.cuh`), and how the model of it is proved.

use std::fmt::Debug;

use foveate_tensor::random::Random;

use super::model::Op::*;
use super::model::{Content, Fault, Op, Ring, Role, STOP, run};

pub const CONSUMERS: usize = 2;
/// Warps of consumers.
pub const WARPS: usize = 4 * CONSUMERS;
/// Steps that are announced ahead.
pub const STEPS: usize = 6;

/// A tile of an item: rows of the other axis, of which some or all are the sequence's.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub content: Content,
    /// Whether there is a tile at all; an item that nobody sees has one step without.
    pub some: bool,
    /// Rows past the end of a sequence are cleared.
    pub ragged: bool,
    pub partial: bool,
    pub first: bool,
    pub last: bool,
}

/// Items of so many tiles each, of which some are ragged, and some evaluated.
pub fn steps(tiles: &[usize], random: &mut Random) -> Vec<Step> {
    let mut all = Vec::new();
    for (item, &count) in tiles.iter().enumerate() {
        for i in 0..count.max(1) {
            let ragged = count > 0 && random.below(4) == 0;
            all.push(Step {
                content: (item, i),
                some: count > 0,
                ragged,
                partial: ragged || random.below(3) == 0,
                first: i == 0,
                last: i + 1 >= count,
            });
        }
    }
    all
}

/// The mbarriers and buffers of the ring of steps, by place.
#[derive(Clone, Copy)]
pub struct StepRing<B, S> {
    pub full: fn(usize) -> B,
    pub empty: fn(usize) -> B,
    pub place: fn(usize) -> S,
}

impl<B: Copy, S: Copy> StepRing<B, S> {
    /// With how many arrive at each.
    pub fn barriers(self) -> impl Iterator<Item = (B, usize)> {
        (0..STEPS).flat_map(move |i| [((self.full)(i), 1), ((self.empty)(i), 3 + WARPS)])
    }

    /// `schedule`.
    pub fn scheduler(self, steps: &[Step]) -> Vec<Op<B, S>> {
        let mut ring = Ring::new(STEPS);
        let mut ops = Vec::new();
        for content in steps.iter().map(|step| step.content).chain([STOP]) {
            ops.push(Wait((self.empty)(ring.stage()), ring.round() - 1));
            ops.push(Write((self.place)(ring.stage()), content));
            ops.push(Arrive((self.full)(ring.stage())));
            ring.advance();
        }
        ops
    }

    /// What a role does with each step, before it releases it.
    pub fn walk(
        self,
        steps: &[Step],
        mut each: impl FnMut(&mut Vec<Op<B, S>>, &Step),
    ) -> Vec<Op<B, S>> {
        let mut ring = Ring::new(STEPS);
        let mut ops = Vec::new();
        for step in steps {
            ops.push(Wait((self.full)(ring.stage()), ring.round()));
            ops.push(Read((self.place)(ring.stage()), step.content));
            each(&mut ops, step);
            ops.push(Read((self.place)(ring.stage()), step.content));
            ops.push(Arrive((self.empty)(ring.stage())));
            ring.advance();
        }
        ops.push(Wait((self.full)(ring.stage()), ring.round()));
        ops.push(Read((self.place)(ring.stage()), STOP));
        ops
    }
}

/// A kernel's barriers and roles for some steps.
pub struct Kernel<B, S> {
    pub barriers: Vec<(B, usize)>,
    pub roles: Vec<Role<B, S>>,
}

/// What an operation is and of which barrier or buffer, without numbers: `Wait KFull`.
fn kind<B: Debug, S: Debug>(op: &Op<B, S>) -> String {
    let text = format!("{op:?}");
    let words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    words.take(2).collect::<Vec<_>>().join(" ")
}

/// Runs the kernel on random items in random orders, and then again without each wait, fence and
/// arrival of each role: the model finds a fault in some order then, or it says nothing. Only the first
/// warp of a consumer releases what products have read; why the others wait for products, which is for
/// their registers, the model does not know.
pub fn prove<B, S>(kernel: impl Fn(&[Step]) -> Kernel<B, S>)
where
    B: Copy + Ord + Debug,
    S: Copy + Ord + Debug,
{
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let tiles: Vec<usize> = (0..random.below(8)).map(|_| random.below(6)).collect();
        let Kernel { barriers, roles } = kernel(&steps(&tiles, &mut random));
        let done = run(&barriers, &roles, &mut random);
        assert_eq!(done, Ok(Vec::new()), "seed {seed}, {tiles:?}");
    }
    // Ragged tiles among whole ones, and steps enough for each ring to go round twice.
    let Kernel { barriers, roles } =
        kernel(&steps(&[3, 0, 1, 2, 1, 7, 0, 1, 5], &mut Random::new(3)));
    let finds = |changed: &[Role<B, S>], runs: u64, fault: fn(&Fault) -> bool| {
        let run = |seed| run(&barriers, changed, &mut Random::new(seed)).err();
        (0..runs).filter_map(run).any(|found| fault(&found))
    };
    let mut names: Vec<&str> = roles.iter().map(|role| role.name.as_str()).collect();
    names.dedup();
    for name in names {
        let of_role = |role: &&Role<B, S>| role.name == name;
        let one = roles.iter().find(of_role).expect("it is a role");
        let mut kinds: Vec<String> = one.ops.iter().map(kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds.retain(|kind| !(name.starts_with("warp") && kind == "AwaitProducts"));
        let is = |kind: &str, names: &[&str]| names.iter().any(|name| kind.starts_with(name));
        for without in kinds.iter().filter(|k| is(k, &["Wait", "Await", "Fence", "Clear"])) {
            let mut changed = roles.clone();
            for role in changed.iter_mut().filter(|role| role.name == name) {
                role.ops.retain(|op| kind(op) != *without);
            }
            assert!(finds(&changed, 600, |_| true), "{name} without {without}");
        }
        for without in kinds.iter().filter(|k| is(k, &["Arrive", "Expect"])) {
            let mut changed = roles.clone();
            for role in changed.iter_mut().filter(|role| role.name == name) {
                let at = role.ops.iter().position(|op| kind(op) == *without);
                at.map(|at| role.ops.remove(at));
            }
            assert!(finds(&changed, 4, |_| true), "{name} without {without}");
        }
    }
}

/// Whether the kernel's text makes the barriers of a model with as many arrivals: `text` has
/// `name(..).init(count);` for each.
pub fn check_counts(texts: &[(&str, &str)], names: &[(&str, usize)], constants: &[(&str, usize)]) {
    let body = |text: &str, function: &str| {
        let rest = text.split(&format!("void {function}() const {{")).nth(1);
        rest.and_then(|rest| rest.split("}\n    }").next()).expect("a function").to_owned()
    };
    let all: String = texts.iter().map(|(text, function)| body(text, function)).collect();
    for (name, arrivals) in names {
        let said = all.split(&format!(" {name}(")).nth(1).expect(name);
        let said = said.split(".init(").nth(1).and_then(|rest| rest.split(");").next());
        let said = said.expect(name);
        let factor = |x: &str| {
            let constant = constants.iter().find(|(name, _)| *name == x.trim());
            constant.map_or_else(|| x.trim().parse().expect(said), |(_, value)| *value)
        };
        let product = |term: &str| term.split('*').map(factor).product::<usize>();
        assert_eq!(said.split('+').map(product).sum::<usize>(), *arrivals, "{name}: {said}");
    }
}
