//! What roles do, and the machine that does it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;

use foveate_tensor::random::Random;

/// Bytes that a copy delivers; the real number does not matter.
pub const BYTES: i64 = 4096;

/// What a buffer holds: item, and tile in it.
pub type Content = (usize, usize);
/// The item after the last one, and the step that says so.
pub const STOP: Content = (usize::MAX, 0);

/// One thing that a role does, to barriers `B` and buffers `S` of shared memory.
#[derive(Clone, Copy, Debug)]
pub enum Op<B, S> {
    /// Waits for a round of a barrier, -1 of a fresh one.
    Wait(B, i64),
    Arrive(B),
    /// Arrives and announces bytes.
    Expect(B, i64),
    /// Starts a copy, which lands later.
    Load(B, S, Content),
    /// Starts a copy by threads (`cp.async`), which lands later and arrives then for all of them.
    CopyByLanes(B, S, Content),
    Write(S, Content),
    /// Overwrites rows past the end of a tile that was copied.
    Clear(S, Content),
    Read(S, Content),
    /// Orders the role's stores before what products and the copy engine read.
    Fence,
    /// Takes a buffer as an operand of the next product, after so many roles have cleared it.
    Multiply(S, Content, usize),
    /// Starts the product of the operands since the last one. It reads them until it ends, some time
    /// after the whole team has started it.
    Start,
    /// Waits until so many products of the team have ended.
    AwaitProducts(usize),
    /// Starts a copy from shared memory, which reads later.
    Send(S, Content),
    /// Waits until the role's copies from shared memory have read.
    AwaitSent,
    /// Waits for, and passes on, the turn of a consumer (named barriers).
    TakeTurn(usize),
    GiveTurn(usize),
}
use Op::*;

/// A thread, a warp, or more threads that do the same together.
#[derive(Clone, Debug)]
pub struct Role<B, S> {
    pub name: String,
    /// The warpgroup, whose warps multiply together.
    pub team: usize,
    pub ops: Vec<Op<B, S>>,
}

/// A position in a ring, as in `hopper.cuh`.
#[derive(Clone, Copy)]
pub struct Ring {
    stages: usize,
    turn: i64,
}

impl Ring {
    pub fn new(stages: usize) -> Self {
        Self { stages, turn: 0 }
    }
    pub fn stage(self) -> usize {
        self.turn.rem_euclid(self.stages as i64) as usize
    }
    pub fn round(self) -> i64 {
        self.turn.div_euclid(self.stages as i64)
    }
    pub fn advance(&mut self) {
        self.turn += 1;
    }
    pub fn before(self) -> Self {
        Self { turn: self.turn - 1, ..self }
    }
}

/// How a run fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Where the roles stand that cannot go on.
    Deadlock(String),
    /// Who does what is wrong in some order.
    Hazard(String),
}

fn hazard<T>(what: String) -> Result<T, Fault> {
    Err(Fault::Hazard(what))
}

/// An mbarrier as PTX has it: a phase is complete when as many have arrived as were initialised and
/// all announced bytes have come.
struct Mbarrier {
    count: usize,
    pending: usize,
    bytes: i64,
    phase: i64,
}

impl Mbarrier {
    fn new(count: usize) -> Self {
        Self { count, pending: count, bytes: 0, phase: 0 }
    }
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
        }
    }
    fn arrive(&mut self, bytes: i64) -> Result<(), Fault> {
        if self.pending == 0 {
            return hazard("an arrival that nobody expects".to_owned());
        }
        self.bytes += bytes;
        self.pending -= 1;
        self.complete();
        Ok(())
    }
    /// A wait sees the parity of the phase alone.
    fn is_over(&self, round: i64) -> Result<bool, Fault> {
        if !(0..=1).contains(&(self.phase - round)) {
            return hazard(format!("a wait for round {round} takes phase {} for it", self.phase));
        }
        Ok(self.phase.rem_euclid(2) != round.rem_euclid(2))
    }
}

/// What shared memory holds.
struct Memory<S> {
    contents: BTreeMap<S, Content>,
    /// Buffers with stores that no fence of their role follows.
    unfenced: BTreeSet<(S, usize)>,
    /// Who has cleared rows of a buffer since the last copy.
    cleared: BTreeMap<S, BTreeSet<usize>>,
}

impl<S: Copy + Ord + Debug> Memory<S> {
    fn read(&self, buffer: S, content: Content) -> Result<(), Fault> {
        match self.contents.get(&buffer) {
            Some(found) if *found == content => Ok(()),
            found => hazard(format!("{buffer:?} holds {found:?} and not {content:?}")),
        }
    }
    fn write(&mut self, role: usize, buffer: S, content: Content) {
        self.contents.insert(buffer, content);
        self.unfenced.insert((buffer, role));
    }
    /// Before products and the copy engine read or write it.
    fn is_fenced(&self, buffer: S) -> Result<(), Fault> {
        match self.unfenced.range((buffer, 0)..=(buffer, usize::MAX)).next() {
            Some(_) => hazard(format!("no fence after a store to {buffer:?}")),
            None => Ok(()),
        }
    }
    fn land(&mut self, buffer: S, content: Content) -> Result<(), Fault> {
        self.is_fenced(buffer)?;
        self.contents.insert(buffer, content);
        self.cleared.remove(&buffer);
        Ok(())
    }
    /// As an operand, or as what the copy engine reads.
    fn multiply(&self, buffer: S, content: Content, clearing: usize) -> Result<(), Fault> {
        self.read(buffer, content)?;
        self.is_fenced(buffer)?;
        match self.cleared.get(&buffer).map_or(0, BTreeSet::len) {
            cleared if cleared < clearing => hazard(format!("{cleared} have cleared {buffer:?}")),
            _ => Ok(()),
        }
    }
}

/// A product under way.
struct Product<S> {
    /// Roles of its team that have not started it.
    missing: usize,
    operands: Vec<(S, Content, usize)>,
}

/// The products of a team.
struct Products<S> {
    roles: usize,
    ended: usize,
    under_way: VecDeque<Product<S>>,
}

impl<S> Products<S> {
    /// A role starts the product after the first `started`.
    fn start(&mut self, started: usize, operands: Vec<(S, Content, usize)>) {
        let at = started - self.ended;
        if at == self.under_way.len() {
            self.under_way.push_back(Product { missing: self.roles, operands });
        }
        self.under_way[at].missing -= 1;
    }
    fn can_end(&self) -> bool {
        self.under_way.front().is_some_and(|product| product.missing == 0)
    }
}

/// Carries the lists out in an order drawn from `random`, in which some roles are faster than
/// others. `barriers` come with how many arrive at each. Returns what was sent, in any order.
///
/// # Errors
/// The first fault that there is in this order.
pub fn run<B: Copy + Ord + Debug, S: Copy + Ord + Debug>(
    barriers: &[(B, usize)],
    roles: &[Role<B, S>],
    random: &mut Random,
) -> Result<Vec<(S, Content)>, Fault> {
    let mut machine = Machine::new(barriers, roles);
    // How soon each role goes on, and after them loads, copies from shared memory, and products. One of
    // them does when hardly anything else can.
    let mut haste: Vec<_> = (0..roles.len() + 3).map(|_| 1 << (12 + 2 * random.below(3))).collect();
    let slowest = random.below(haste.len());
    haste[slowest] = 1;
    let haste_of = |event: &Event| match *event {
        Event::GoesOn(role) => haste[role],
        Event::Lands(_) => haste[roles.len()],
        Event::IsSent(_) => haste[roles.len() + 1],
        Event::Ends(_) => haste[roles.len() + 2],
    };
    loop {
        let events = machine.events();
        let Some(&last) = events.last() else { return machine.end() };
        let mut drawn = random.below(events.iter().map(haste_of).sum());
        let is_drawn = |event: &&Event| match drawn.checked_sub(haste_of(event)) {
            Some(rest) => {
                drawn = rest;
                false
            }
            None => true,
        };
        machine.advance(events.iter().find(is_drawn).copied().unwrap_or(last))?;
    }
}

/// What can happen next.
#[derive(Clone, Copy)]
enum Event {
    /// A role does what is next in its list.
    GoesOn(usize),
    /// The nth of the copies under way lands.
    Lands(usize),
    /// The nth of the copies from shared memory has read.
    IsSent(usize),
    /// The oldest product of a team ends.
    Ends(usize),
}

/// A copy under way.
struct Landing<B, S> {
    barrier: B,
    buffer: S,
    content: Content,
    /// Whether it arrives; otherwise its bytes were announced.
    arrives: bool,
}

/// Where all roles stand, and what they have started.
struct Machine<'a, B, S> {
    roles: &'a [Role<B, S>],
    /// Of each role: how much of its list it has done, and whether it waits for an event.
    at: Vec<usize>,
    waits: Vec<bool>,
    /// Of each role: products that it has started, and operands of the next one.
    started: Vec<usize>,
    operands: Vec<Vec<(S, Content, usize)>>,
    barriers: BTreeMap<B, Mbarrier>,
    memory: Memory<S>,
    landing: Vec<Landing<B, S>>,
    sending: Vec<(usize, S, Content)>,
    sent: Vec<(S, Content)>,
    turns: BTreeMap<usize, i32>,
    /// By team.
    products: BTreeMap<usize, Products<S>>,
}

impl<'a, B: Copy + Ord + Debug, S: Copy + Ord + Debug> Machine<'a, B, S> {
    fn new(barriers: &[(B, usize)], roles: &'a [Role<B, S>]) -> Self {
        let mut products: BTreeMap<usize, Products<S>> = BTreeMap::new();
        for role in roles {
            let none = || Products { roles: 0, ended: 0, under_way: VecDeque::new() };
            products.entry(role.team).or_insert_with(none).roles += 1;
        }
        Self {
            roles,
            at: vec![0; roles.len()],
            waits: vec![false; roles.len()],
            started: vec![0; roles.len()],
            operands: vec![Vec::new(); roles.len()],
            barriers: barriers.iter().map(|&(b, count)| (b, Mbarrier::new(count))).collect(),
            memory: Memory {
                contents: BTreeMap::new(),
                unfenced: BTreeSet::new(),
                cleared: BTreeMap::new(),
            },
            landing: Vec::new(),
            sending: Vec::new(),
            sent: Vec::new(),
            turns: BTreeMap::new(),
            products,
        }
    }

    fn events(&self) -> Vec<Event> {
        let able = (0..self.roles.len())
            .filter(|&r| self.at[r] < self.roles[r].ops.len() && !self.waits[r]);
        let ending = self.products.iter().filter(|(_, all)| all.can_end());
        able.map(Event::GoesOn)
            .chain((0..self.landing.len()).map(Event::Lands))
            .chain((0..self.sending.len()).map(Event::IsSent))
            .chain(ending.map(|(&team, _)| Event::Ends(team)))
            .collect()
    }

    fn advance(&mut self, event: Event) -> Result<(), Fault> {
        match event {
            Event::GoesOn(role) => {
                let Role { name, ops, .. } = &self.roles[role];
                let op = ops[self.at[role]];
                let done = self.carry_out(role, op).map_err(|fault| match fault {
                    Fault::Hazard(what) => Fault::Hazard(format!("{name}, {op:?}: {what}")),
                    deadlock => deadlock,
                })?;
                if !done {
                    self.waits[role] = true;
                    return Ok(());
                }
                self.at[role] += 1;
            }
            Event::Lands(copy) => {
                let Landing { barrier, buffer, content, arrives } = self.landing.swap_remove(copy);
                self.memory.land(buffer, content)?;
                let full = self.barriers.get_mut(&barrier).expect("it was made");
                if arrives {
                    full.arrive(0)?;
                } else {
                    full.bytes -= BYTES;
                    full.complete();
                }
            }
            Event::IsSent(copy) => {
                let (_, buffer, content) = self.sending.swap_remove(copy);
                self.memory.multiply(buffer, content, 0)?;
                self.sent.push((buffer, content));
            }
            Event::Ends(team) => {
                let of_team = self.products.get_mut(&team).expect("it was listed");
                of_team.ended += 1;
                let ended = of_team.under_way.pop_front().expect("it can end");
                for (buffer, content, clearing) in ended.operands {
                    self.memory.multiply(buffer, content, clearing)?;
                }
            }
        }
        self.waits.fill(false);
        Ok(())
    }

    /// Whether the role is done with `op`, or has to wait.
    fn carry_out(&mut self, role: usize, op: Op<B, S>) -> Result<bool, Fault> {
        let team = self.roles[role].team;
        let memory = &mut self.memory;
        let mut arrive =
            |barrier, bytes| self.barriers.get_mut(&barrier).expect("it was made").arrive(bytes);
        match op {
            Wait(barrier, round) => return self.barriers[&barrier].is_over(round),
            Arrive(barrier) => arrive(barrier, 0)?,
            Expect(barrier, bytes) => arrive(barrier, bytes)?,
            Load(barrier, buffer, content) => {
                self.landing.push(Landing { barrier, buffer, content, arrives: false });
            }
            CopyByLanes(barrier, buffer, content) => {
                self.landing.push(Landing { barrier, buffer, content, arrives: true });
            }
            Write(buffer, content) => memory.write(role, buffer, content),
            Clear(buffer, content) => {
                memory.read(buffer, content)?;
                memory.write(role, buffer, content);
                memory.cleared.entry(buffer).or_default().insert(role);
            }
            Read(buffer, content) => memory.read(buffer, content)?,
            Fence => memory.unfenced.retain(|&(_, by)| by != role),
            Multiply(buffer, content, clearing) => {
                self.operands[role].push((buffer, content, clearing));
                memory.multiply(buffer, content, clearing)?;
            }
            Start => {
                let of_team = self.products.get_mut(&team).expect("it was made");
                of_team.start(self.started[role], std::mem::take(&mut self.operands[role]));
                self.started[role] += 1;
            }
            AwaitProducts(count) => return Ok(self.products[&team].ended >= count),
            Send(buffer, content) => self.sending.push((role, buffer, content)),
            AwaitSent => return Ok(self.sending.iter().all(|&(by, ..)| by != role)),
            TakeTurn(consumer) => {
                let turn = self.turns.entry(consumer).or_default();
                let goes = *turn > 0;
                *turn -= i32::from(goes);
                return Ok(goes);
            }
            GiveTurn(consumer) => {
                let turn = self.turns.entry(consumer).or_default();
                *turn += 1;
                if *turn != 1 {
                    return hazard("a turn is given before the last one was taken".to_owned());
                }
            }
        }
        Ok(true)
    }

    /// What was sent, where every role is at the end of its list.
    fn end(self) -> Result<Vec<(S, Content)>, Fault> {
        let stand = self.roles.iter().zip(&self.at);
        let left = stand.filter_map(|(role, &at)| Some((&role.name, role.ops.get(at)?)));
        let left: Vec<_> = left.map(|(name, op)| format!("{name} at {op:?}")).collect();
        if left.is_empty() { Ok(self.sent) } else { Err(Fault::Deadlock(left.join("; "))) }
    }
}
