//! A step, derived from the map and from what its stages need.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use foveate::tensor::ElementType;

use crate::error::{ShardError, refused};
use crate::layout::Sharding;
use crate::map::{Axis, Map};
use crate::mesh::MeshAxis;
use crate::ranges::Ranges;
use crate::step::{
    Again, Among, Call, Copies, Edge, EdgeKind, Event, Given, GroupShape, Held, Moved, Owned,
    RankStep, Read, Stays, StepPlan, StepShape, StepStage, Terms,
};

impl StepPlan {
    /// The step of a model of `shape` whose arrays are cut as `sharding` says.
    ///
    /// # Errors
    /// When `shape` is not one of a model on this mesh, or no single transfer leads from a layout to the next.
    pub fn new(sharding: &Sharding, shape: &StepShape) -> Result<Self, ShardError> {
        let map = sharding.map();
        let parts = map.parts(Axis::Heads);
        let first = shape.groups.first().map_or(&[][..], |groups| groups);
        let named =
            |groups: &[GroupShape]| groups.iter().map(|g| g.name.clone()).collect::<Vec<_>>();
        let alike = shape.groups.iter().all(|groups| named(groups) == named(first));
        if shape.groups.len() != parts || !alike || first.len() != shape.again.len() + 2 {
            return refused(format!(
                "a step of {} layers on {parts} ranks of tensor has the groups of an embedding, of \
                 each layer and of a head for each of these ranks",
                shape.again.len()
            ));
        }
        if shape.batches == 0 {
            return refused("a step has a batch or more");
        }
        let tokens = axes_of(map, &[Axis::Batch, Axis::Seq]);
        if map
            .of(Axis::Elements)
            .iter()
            .any(|axis| map.mesh().size(*axis) > 1 && !tokens.contains(axis))
        {
            return refused("a step is planned for elements that go where batch and seq go");
        }
        if shape.in_backward && shape.batches > 1 {
            return refused(format!(
                "groups are updated in the backward pass of one batch a step, not of {}",
                shape.batches
            ));
        }
        let mut step = Deriving::new(sharding, shape, tokens);
        for batch in 0..shape.batches {
            step.batch(batch)?;
        }
        step.end()?;
        let events = step.events;
        let mut plan =
            Self { sharding: sharding.clone(), shape: shape.clone(), events, ranks: vec![] };
        plan.ranks = Calls::new(&plan).ranks();
        Ok(plan)
    }
}

/// The axes of the mesh that cut any of `axes`, those of size 1 left out, in their order.
pub(crate) fn axes_of(map: &Map, axes: &[Axis]) -> Vec<MeshAxis> {
    let cuts = |on: &MeshAxis| {
        map.mesh().size(*on) > 1 && axes.iter().any(|axis| map.of(*axis).contains(on))
    };
    MeshAxis::ALL.into_iter().filter(cuts).collect()
}

/// What the loss is called, and the number of labels.
pub(crate) const LOSS: &str = "loss, z-loss and labels";

/// A value and what ranks have of it.
type Has = (String, Held);

/// Events so far.
struct Deriving<'a> {
    map: &'a Map,
    /// Elements of a token of the stream.
    width: usize,
    shape: &'a StepShape,
    /// The axes over which ranks have other tokens.
    tokens: Vec<MeshAxis>,
    events: Vec<Event>,
    edges: usize,
    /// Groups whose weights are gathered, or are being.
    held: Vec<bool>,
    /// Stages of the batch that have not begun, by group and whether they are of the backward pass.
    ahead: VecDeque<(usize, bool)>,
    /// The group that is updated next, where groups are updated in the backward pass.
    pending: Option<usize>,
    /// The loss and the labels of all ranks, once they are summed.
    told: Option<Has>,
    /// Of each layer of the batch, the stream before attention, and before the feed-forward part.
    tape: Vec<[Has; 2]>,
}

impl<'a> Deriving<'a> {
    fn new(sharding: &'a Sharding, shape: &'a StepShape, tokens: Vec<MeshAxis>) -> Self {
        Self {
            map: sharding.map(),
            width: sharding.cut(Axis::Hidden).len(),
            shape,
            tokens,
            events: Vec::new(),
            edges: 0,
            held: vec![false; shape.groups[0].len()],
            ahead: VecDeque::new(),
            pending: None,
            told: None,
            tape: Vec::new(),
        }
    }

    fn name(&self, group: usize) -> &'a str {
        &self.shape.groups[0][group].name
    }

    fn groups(&self) -> usize {
        self.held.len()
    }

    fn is_cut(&self) -> bool {
        !axes_of(self.map, &[Axis::Elements]).is_empty()
    }

    fn axis(&self, axis: Axis) -> (Axis, Vec<MeshAxis>) {
        (axis, axes_of(self.map, &[axis]))
    }

    fn terms(&self, over: Vec<MeshAxis>, of: &[Axis]) -> Vec<Terms> {
        let terms = Terms { over, of: of.to_vec(), copies: None };
        if terms.over.is_empty() { vec![] } else { vec![terms] }
    }

    /// The stream, of a rank's tokens between products.
    fn stream(&self) -> Held {
        let is_cut = axes_of(self.map, &[Axis::Stream]) != axes_of(self.map, &[Axis::Seq]);
        let tokens = if is_cut { Axis::Stream } else { Axis::Seq };
        let axes = [Axis::Batch, tokens, Axis::Hidden].map(|axis| self.axis(axis)).into();
        Held { element: self.shape.weights, axes, terms: vec![] }
    }

    /// The stream, of all tokens that a product reads.
    fn of_all(&self) -> Held {
        let axes = [Axis::Batch, Axis::Seq, Axis::Hidden].map(|axis| self.axis(axis)).into();
        Held { element: self.shape.weights, axes, terms: vec![] }
    }

    /// What a product with a matrix that is cut along `of` gives of the stream.
    fn sum(&self, of: Axis) -> Held {
        Held { terms: self.terms(axes_of(self.map, &[of]), &[of]), ..self.of_all() }
    }

    fn elements(&self, element: ElementType, cut: bool, terms: Vec<Terms>) -> Held {
        let on = if cut { axes_of(self.map, &[Axis::Elements]) } else { vec![] };
        Held { element, axes: vec![(Axis::Elements, on)], terms }
    }

    fn stage(&mut self, name: String, reads: &[&Has], gives: &[(&str, Held)], drops: &[&str]) {
        let read = |has: &&Has| Read { value: has.0.clone(), held: has.1.clone(), batches: 1 };
        let give = |(value, held): &(&str, Held)| Given {
            value: (*value).to_owned(),
            held: held.clone(),
            adds: false,
        };
        self.events.push(Event::Stage(StepStage {
            name,
            reads: reads.iter().map(read).collect(),
            gives: gives.iter().map(give).collect(),
            drops: drops.iter().map(|value| (*value).to_owned()).collect(),
        }));
    }

    /// An edge from a value to it as the next stage needs it, `to`; none where it is like that. Returns what the
    /// stage reads.
    fn bring(&mut self, from: &Has, to: Has, moved: Moved, more: More) -> Result<Has, ShardError> {
        if from.1 == to.1 {
            return Ok(from.clone());
        }
        let Some(transfer) = from.1.transfer(&to.1) else {
            return refused(format!(
                "{}: no transfer leads from {} to {}; change the map",
                from.0, from.1, to.1
            ));
        };
        let More { adds, travels, beside } = more;
        self.events.push(Event::Edge(Edge {
            number: self.edges,
            values: [from.0.clone(), to.0.clone()],
            from: from.1.clone(),
            to: to.1.clone(),
            kind: transfer.kind,
            moved,
            adds,
            travels: travels.unwrap_or(from.1.element),
            beside,
        }));
        self.edges += 1;
        Ok(to)
    }

    /// The stream of a rank's tokens, brought to all tokens, or a sum of the stream, to a rank's tokens.
    fn bring_stream(&mut self, from: &Has, name: &str, to: Held) -> Result<Has, ShardError> {
        let (to, moved) = ((name.to_owned(), to), Moved::Tokens { width: self.width });
        self.bring(from, to, moved, More::default())
    }

    /// A group's weights, as a stage reads them.
    fn weights(&self, group: usize) -> Has {
        let gathered = if self.is_cut() { ", gathered" } else { "" };
        let name = format!("{} weights{gathered}", self.name(group));
        (name, self.elements(self.shape.weights, false, vec![]))
    }

    fn used_with(&self, group: usize) -> Vec<usize> {
        match self.shape.tied && group + 1 == self.groups() {
            true => vec![0, group],
            false => vec![group],
        }
    }

    /// A stage is about to begin: weights that nobody needs any more are dropped, its own are gathered, and
    /// those of the next one begin to be.
    fn turn(&mut self) -> Result<(), ShardError> {
        let Some((now, backward)) = self.ahead.pop_front() else { return Ok(()) };
        let used = self.used_with(now);
        if !self.is_cut() {
            return Ok(());
        }
        let next = self.ahead.front().map_or(Vec::new(), |&(group, _)| self.used_with(group));
        let later: Vec<usize> = match self.shape.stays {
            Stays::Layer => next.clone(),
            Stays::Batch => self.ahead.iter().flat_map(|&(g, _)| self.used_with(g)).collect(),
            Stays::Step => (0..self.groups()).collect(),
        };
        let gone =
            |group: &usize| self.held[*group] && !used.contains(group) && !later.contains(group);
        let gone: Vec<usize> = (0..self.groups()).filter(gone).collect();
        self.drop_weights(&gone);
        for &group in used.iter().chain(&next) {
            if std::mem::replace(&mut self.held[group], true) {
                continue;
            }
            let way = if backward { "backward" } else { "forward" };
            let beside = (!used.contains(&group)).then(|| format!("{} {way}", self.name(now)));
            let own = format!("{} weights", self.name(group));
            let own = (own, self.elements(self.shape.weights, true, vec![]));
            let moved = Moved::Elements { group, trained: false };
            self.bring(&own, self.weights(group), moved, More { beside, ..More::default() })?;
        }
        Ok(())
    }

    fn drop_weights(&mut self, groups: &[usize]) {
        let values: Vec<String> = groups.iter().map(|&group| self.weights(group).0).collect();
        groups.iter().for_each(|&group| self.held[group] = false);
        if !values.is_empty() {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            self.stage("weights are dropped".to_owned(), &[], &[], &values);
        }
    }

    fn drop_all_weights(&mut self) {
        let held: Vec<usize> = (0..self.groups()).filter(|&group| self.held[group]).collect();
        self.drop_weights(&held);
    }

    fn batch(&mut self, batch: usize) -> Result<(), ShardError> {
        let layers = self.groups() - 2;
        let forward = (0..layers + 2).map(|group| (group, false));
        self.ahead = forward.chain((1..=layers).rev().map(|group| (group, true))).collect();
        self.tape.clear();
        self.turn()?;
        let mut x = self.embedding()?;
        for layer in 0..layers {
            self.turn()?;
            x = self.layer(layer, &x)?;
        }
        self.turn()?;
        let mut d_x = self.head(&x)?;
        self.reduce(layers + 1, batch)?;
        for layer in (0..layers).rev() {
            self.turn()?;
            d_x = self.layer_backward(layer, &d_x)?;
            self.reduce(layer + 1, batch)?;
        }
        self.embedding_backward(&d_x)?;
        self.reduce(0, batch)?;
        if self.shape.stays != Stays::Step {
            self.drop_all_weights();
        }
        Ok(())
    }

    fn embedding(&mut self) -> Result<Has, ShardError> {
        let table = self.weights(0);
        let terms = ("embeddings, by token id".to_owned(), self.sum(Axis::Vocab));
        self.stage("embedding forward".into(), &[&table], &[(&terms.0, terms.1.clone())], &[]);
        self.bring_stream(&terms, "embeddings", self.stream())
    }

    /// The norm of a stream, brought to all tokens; and what is dropped when it was read.
    fn normed(&mut self, name: &str, x: &Has) -> Result<(Has, Vec<String>), ShardError> {
        let own = (format!("{name} normed"), self.stream());
        self.stage(format!("{name}: norm"), &[x], &[(&own.0, own.1.clone())], &[]);
        let all = self.bring_stream(&own, &format!("{name} normed, all tokens"), self.of_all())?;
        let mut drops = vec![own.0, all.0.clone()];
        drops.dedup();
        Ok((all, drops))
    }

    /// From the input of a layer to what it is with attention's output.
    fn attention(&mut self, layer: usize, x: &Has) -> Result<Has, ShardError> {
        let (g, weights) = (self.name(layer + 1), self.weights(layer + 1));
        let (normed, drops) = self.normed(&format!("{g} attention"), x)?;
        let terms = (format!("{g} attention, by head"), self.sum(Axis::Heads));
        let drops: Vec<&str> = drops.iter().map(String::as_str).collect();
        let gives = [(terms.0.as_str(), terms.1.clone())];
        self.stage(format!("{g}: attention"), &[&normed, &weights], &gives, &drops);
        self.bring_stream(&terms, &format!("{g} middle"), self.stream())
    }

    fn layer(&mut self, layer: usize, x: &Has) -> Result<Has, ShardError> {
        let (g, weights) = (self.name(layer + 1), self.weights(layer + 1));
        let middle = self.attention(layer, x)?;
        self.tape.push([x.clone(), middle.clone()]);
        let (normed, mut drops) = self.normed(&format!("{g} feed-forward"), &middle)?;
        if self.shape.again[layer].out {
            drops.push(middle.0.clone());
        }
        let terms = (format!("{g} feed-forward, by column"), self.sum(Axis::Ffn));
        let drops: Vec<&str> = drops.iter().map(String::as_str).collect();
        let gives = [(terms.0.as_str(), terms.1.clone())];
        self.stage(format!("{g}: feed-forward"), &[&normed, &weights], &gives, &drops);
        self.bring_stream(&terms, &format!("{g} output"), self.stream())
    }

    /// Head and loss; the gradient of the stream before them.
    fn head(&mut self, x: &Has) -> Result<Has, ShardError> {
        let (head, layers) = (self.groups() - 1, self.groups() - 2);
        let weights: Vec<Has> =
            self.used_with(head).into_iter().map(|group| self.weights(group)).collect();
        let (normed, drops) = self.normed("head", x)?;
        let reads: Vec<&Has> = std::iter::once(&normed).chain(&weights).collect();
        let tokens = vec![self.axis(Axis::Batch), self.axis(Axis::Seq)];
        let of_ids = self.terms(axes_of(self.map, &[Axis::Vocab]), &[Axis::Vocab]);
        let of_ids = Held { element: ElementType::F32, axes: tokens, terms: of_ids };
        let logits = ("logits' maximum, sum and label, by token id".to_owned(), of_ids);
        self.stage("logits".into(), &reads, &[(&logits.0, logits.1.clone())], &[]);
        let whole = ("logits' sums".to_owned(), Held { terms: vec![], ..logits.1.clone() });
        let whole = self.bring(&logits, whole, Moved::Tokens { width: 3 }, More::default())?;
        let d_normed = ("head gradient, by token id".to_owned(), self.sum(Axis::Vocab));
        let mut gives = vec![(d_normed.0.as_str(), d_normed.1.clone())];
        let of_embedding = format!("{} gradients by the head", self.name(0));
        if self.shape.tied && self.trains(0) {
            gives.push((&of_embedding, self.gradients(0)));
        }
        let drops: Vec<&str> = drops.iter().map(String::as_str).chain([whole.0.as_str()]).collect();
        let reads: Vec<&Has> = reads.into_iter().chain([&whole]).collect();
        self.stage("loss".into(), &reads, &gives, &drops);
        if let Some(Event::Stage(stage)) = self.events.last_mut() {
            let everyone = axes_of(self.map, &Axis::ALL);
            let terms = Terms { over: everyone, of: vec![Axis::Seq], copies: None };
            let terms = if terms.over.is_empty() { vec![] } else { vec![terms] };
            let held = Held { element: ElementType::F64, axes: vec![], terms };
            stage.gives.push(Given { value: LOSS.to_owned(), held, adds: true });
        }
        let d_normed = self.bring_stream(&d_normed, "head gradient", self.stream())?;
        let d_x = (format!("{} d_output", self.name(layers)), self.stream());
        let gradients = self.of_a_batch(head);
        let mut gives = vec![(d_x.0.as_str(), d_x.1.clone())];
        gives.extend(gradients.as_ref().map(|g| (g.0.as_str(), g.1.clone())));
        let drops = [d_normed.0.as_str(), &x.0];
        self.stage("head backward".into(), &[&d_normed, x], &gives, &drops);
        Ok(d_x)
    }

    fn layer_backward(&mut self, layer: usize, d_x: &Has) -> Result<Has, ShardError> {
        let (group, weights) = (layer + 1, self.weights(layer + 1));
        let g = self.name(group);
        let [input, middle] = self.tape[layer].clone();
        let Again { qkv, out, gate_up, down } = self.shape.again[layer];
        if out {
            self.attention(layer, &input)?;
        } else if qkv {
            let (normed, drops) = self.normed(&format!("{g} attention"), &input)?;
            let drops: Vec<&str> = drops.iter().map(String::as_str).collect();
            self.stage(format!("{g}: attention again"), &[&normed, &weights], &[], &drops);
        }
        if gate_up {
            let (normed, drops) = self.normed(&format!("{g} feed-forward"), &middle)?;
            let drops: Vec<&str> = drops.iter().map(String::as_str).collect();
            let terms = (format!("{g} feed-forward, by column"), self.sum(Axis::Ffn));
            let gives = [(terms.0.as_str(), terms.1.clone())];
            let gives = if down { &gives[..] } else { &[] };
            self.stage(format!("{g}: gate, up again"), &[&normed, &weights], gives, &drops);
            if down {
                let name = format!("{g} feed-forward, again");
                let sum = self.bring_stream(&terms, &name, self.stream())?;
                self.stage(format!("{g}: norm again"), &[&sum], &[], &[&sum.0]);
            }
        }
        let d_middle = self.half_backward(layer, [d_x, &middle], ("feed-forward", Axis::Ffn))?;
        self.half_backward(layer, [&d_middle, &input], ("attention", Axis::Heads))
    }

    /// From the gradient behind one of the two sums of a layer to that of the stream before its norm.
    fn half_backward(
        &mut self,
        layer: usize,
        [d_y, x]: [&Has; 2],
        (what, of): (&str, Axis),
    ) -> Result<Has, ShardError> {
        let (g, weights) = (self.name(layer + 1), self.weights(layer + 1));
        let of_all = self.of_all();
        let whole = self.bring_stream(d_y, &format!("{g} {what} d_output, all tokens"), of_all)?;
        let (normed, mut drops) = self.normed(&format!("{g} {what}"), x)?;
        drops.extend([d_y.0.clone(), whole.0.clone(), x.0.clone()]);
        let terms = (format!("{g} {what} d_input, by part"), self.sum(of));
        let reads = [&whole, &normed, &weights, x];
        let is_last = what == "attention";
        let gradients = self.of_a_batch(layer + 1).filter(|_| is_last);
        let mut gives = vec![(terms.0.as_str(), terms.1.clone())];
        gives.extend(gradients.as_ref().map(|g| (g.0.as_str(), g.1.clone())));
        drops.sort();
        drops.dedup();
        let drops: Vec<&str> = drops.iter().map(String::as_str).collect();
        self.stage(format!("{g}: {what} backward"), &reads, &gives, &drops);
        let d_x = self.bring_stream(&terms, &format!("{g} {what} d_input"), self.stream())?;
        Ok(d_x)
    }

    fn embedding_backward(&mut self, d_x: &Has) -> Result<(), ShardError> {
        if !self.trains(0) {
            self.stage("nothing of the embedding is trained".into(), &[], &[], &[&d_x.0]);
            return Ok(());
        }
        let whole = self.bring_stream(d_x, "d_embeddings, all tokens", self.of_all())?;
        let by_head = format!("{} gradients by the head", self.name(0));
        let by_head = (by_head, self.gradients(0));
        let gradients = self.of_a_batch(0);
        let mut reads = vec![&whole];
        let mut drops = vec![d_x.0.as_str(), &whole.0];
        drops.dedup();
        if self.shape.tied && gradients.is_some() {
            reads.push(&by_head);
            drops.push(&by_head.0);
        }
        let gives: Vec<(&str, Held)> =
            gradients.iter().map(|g| (g.0.as_str(), g.1.clone())).collect();
        self.stage("embedding backward".into(), &reads, &gives, &drops);
        Ok(())
    }

    fn trains(&self, group: usize) -> bool {
        self.shape.groups.iter().any(|groups| groups[group].trained > 0)
    }

    /// The group that a backward pass comes to last of those that are trained.
    fn first_trained(&self) -> Option<usize> {
        (0..self.groups()).find(|&group| self.trains(group))
    }

    /// Gradients of a group as a backward pass gives them.
    fn gradients(&self, group: usize) -> Held {
        let mut terms = Vec::new();
        for among in [Copies::All, Copies::KvHeads] {
            let of = self.shape.groups.iter().flat_map(|groups| &groups[group].copied);
            let mut of: Vec<Axis> =
                of.filter(|copied| copied.among == among).map(|copied| copied.of).collect();
            of.sort();
            of.dedup();
            if !of.is_empty() {
                let over = axes_of(self.map, &[Axis::Heads]);
                terms.push(Terms { over, of, copies: Some(among) });
            }
        }
        terms.extend(self.terms(self.tokens.clone(), &[Axis::Seq]));
        self.elements(ElementType::F32, false, terms)
    }

    fn of_a_batch(&self, group: usize) -> Option<Has> {
        let name = format!("{} gradients of a batch", self.name(group));
        self.trains(group).then(|| (name, self.gradients(group)))
    }

    /// What of the sum over tokens is missing where a rank's elements were reduced.
    fn own_gradients(&self, group: usize, replicas: bool) -> Has {
        let elements = axes_of(self.map, &[Axis::Elements]);
        let over: Vec<_> = self.tokens.iter().copied().filter(|a| !elements.contains(a)).collect();
        let terms = if replicas { vec![] } else { self.terms(over, &[Axis::Seq]) };
        let name = format!("{} gradients", self.name(group));
        (name, self.elements(ElementType::F32, true, terms))
    }

    /// Sums the gradients of a group.
    fn reduce(&mut self, group: usize, batch: usize) -> Result<(), ShardError> {
        let Some(mut has) = self.of_a_batch(group) else { return Ok(()) };
        let moved = Moved::Elements { group, trained: true };
        while let Some(at) = has.1.terms.iter().position(|terms| terms.copies.is_some()) {
            let mut to = has.clone();
            to.1.terms.remove(at);
            has = self.bring(&has, to, moved, More::default())?;
        }
        let own = self.own_gradients(group, false);
        let adds = batch > 0;
        if has.1 == own.1 {
            self.stage(format!("{}: add", has.0), &[&has], &[(&own.0, own.1.clone())], &[&has.0]);
            if let Some(Event::Stage(stage)) = self.events.last_mut() {
                stage.gives[0].adds = adds;
            }
        } else {
            let beside = (group > 0).then(|| format!("{} backward", self.name(group - 1)));
            let travels = Some(self.shape.reduces);
            self.bring(&has, own, moved, More { adds, travels, beside })?;
        }
        if !self.shape.in_backward {
            return Ok(());
        }
        self.replicas(group)?;
        if self.is_cut() || self.map.mesh().size(MeshAxis::Replicate) > 1 {
            // One sum is on its way while the next group is computed.
            if let Some(before) = self.pending.replace(group) {
                self.update(&[before])?;
            }
            match self.first_trained() == Some(group) {
                true => self.pending.take().map_or(Ok(()), |last| self.update(&[last])),
                false => Ok(()),
            }
        } else {
            self.update(&[group])
        }
    }

    fn replicas(&mut self, group: usize) -> Result<(), ShardError> {
        let (own, all) = (self.own_gradients(group, false), self.own_gradients(group, true));
        let moved = Moved::Elements { group, trained: true };
        self.bring(&own, all, moved, More::default()).map(|_| ())
    }

    /// The norm of the gradients of some groups, and their update.
    fn update(&mut self, groups: &[usize]) -> Result<(), ShardError> {
        let gradients: Vec<Has> =
            groups.iter().map(|&group| self.own_gradients(group, true)).collect();
        let everyone = axes_of(self.map, &Axis::ALL);
        let loss = self.terms(everyone.clone(), &[Axis::Seq]);
        let totals = self.terms(everyone, &[Axis::Seq, Axis::Elements]);
        let numbers = |terms| Held { element: ElementType::F64, axes: vec![], terms };
        let totals = ("norm, loss, z-loss and labels".to_owned(), numbers(totals));
        let loss = (LOSS.to_owned(), numbers(loss));
        let batches = self.shape.batches;
        // Ranks with the same gradients have the same norm, and know of each other's losses from the first sum.
        let known = self.told.take().filter(|_| !self.is_cut());
        let all = if let Some(all) = known {
            all
        } else {
            let reads: Vec<&Has> = gradients.iter().chain([&loss]).collect();
            self.stage("norm".into(), &reads, &[(&totals.0, totals.1.clone())], &[]);
            if let Some(Event::Stage(stage)) = self.events.last_mut() {
                stage.reads.iter_mut().for_each(|read| read.batches = batches);
            }
            let all = ("norm, loss, z-loss and labels of all".to_owned(), numbers(vec![]));
            self.bring(&totals, all, Moved::Totals, More::default())?
        };
        self.told = Some(all.clone());
        let masters: Vec<Has> = groups
            .iter()
            .map(|&group| {
                let weights = self.elements(self.shape.weights, true, vec![]);
                (format!("{} weights", self.name(group)), weights)
            })
            .collect();
        let reads: Vec<&Has> = [&all].into_iter().chain(&gradients).chain(&masters).collect();
        let mut drops: Vec<&str> = gradients.iter().map(|has| has.0.as_str()).collect();
        let last = (0..self.groups()).find(|&group| self.trains(group));
        if self.is_cut()
            || !self.shape.in_backward
            || last.is_none_or(|last| groups.contains(&last))
        {
            drops.push(&all.0);
        }
        self.stage("update".into(), &reads, &[], &drops);
        if let Some(Event::Stage(stage)) = self.events.last_mut() {
            let of_gradients = gradients.len();
            stage.reads[1..=of_gradients].iter_mut().for_each(|read| read.batches = batches);
        }
        Ok(())
    }

    /// Behind all batches.
    fn end(&mut self) -> Result<(), ShardError> {
        self.drop_all_weights();
        if self.shape.in_backward {
            return Ok(());
        }
        let trained: Vec<usize> = (0..self.groups()).filter(|&group| self.trains(group)).collect();
        for &group in &trained {
            self.replicas(group)?;
        }
        self.update(&trained)
    }
}

/// What else an edge says.
#[derive(Default)]
struct More {
    adds: bool,
    travels: Option<ElementType>,
    beside: Option<String>,
}

/// The calls of ranks, of which those with the same place on `tensor` and the same tokens of their rows have the
/// same, and those with the same elements where there are replicas.
struct Calls<'a> {
    plan: &'a StepPlan,
    edges: Vec<Edge>,
    members: HashMap<Vec<usize>, Arc<Vec<usize>>>,
}

impl<'a> Calls<'a> {
    fn new(plan: &'a StepPlan) -> Self {
        Self { plan, edges: plan.edges().cloned().collect(), members: HashMap::new() }
    }

    fn ranks(mut self) -> Vec<RankStep> {
        let map = self.plan.sharding.map();
        let (mut calls, mut owned) = (HashMap::new(), HashMap::new());
        let mut ranks = Vec::new();
        for rank in 0..map.mesh().ranks() {
            let (tensor, elements) = (map.part(Axis::Heads, rank), map.part(Axis::Elements, rank));
            let groups = self.groups(rank);
            let first = groups[Among::Replicas as usize].first() == Some(&rank);
            let own: &Arc<Vec<Owned>> = owned
                .entry([tensor, elements, usize::from(first)])
                .or_insert_with(|| Arc::new(self.owned(tensor, elements, first)));
            // Sums of replicas are of the elements that these own.
            let own_elements = groups[Among::Replicas as usize].len() > 1;
            let elements = if own_elements { elements } else { 0 };
            let call: &Arc<Vec<Call>> = calls
                .entry([tensor, map.part(Axis::Seq, rank), elements])
                .or_insert_with(|| Arc::new(self.calls(rank)));
            let (owned, calls) = (Arc::clone(own), Arc::clone(call));
            let one = |members: Vec<usize>| {
                let known = self.members.entry(members);
                let members = Arc::new(known.key().clone());
                Arc::clone(known.or_insert(members))
            };
            let groups = groups.into_iter().map(one).collect();
            ranks.push(RankStep { owned, groups, calls, counts_tokens: tensor == 0 });
        }
        ranks
    }

    /// The members of each of [`Among::ALL`].
    fn groups(&self, rank: usize) -> Vec<Vec<usize>> {
        let sharding = &self.plan.sharding;
        let map = sharding.map();
        let mesh = map.mesh();
        let elements = axes_of(map, &[Axis::Elements]);
        let replicas: Vec<MeshAxis> = axes_of(map, &[Axis::Batch, Axis::Seq])
            .into_iter()
            .filter(|axis| !elements.contains(axis))
            .collect();
        let tensor = mesh.group(rank, &axes_of(map, &[Axis::Heads]));
        let holders = sharding.cut(Axis::KvHeads).copies(map.part(Axis::KvHeads, rank));
        let holders = tensor[holders].to_vec();
        vec![
            mesh.group(rank, &elements),
            mesh.group(rank, &replicas),
            tensor,
            holders,
            (0..mesh.ranks()).collect(),
        ]
    }

    fn owned(&self, tensor: usize, part: usize, first_replica: bool) -> Vec<Owned> {
        let StepShape { groups, block, .. } = &self.plan.shape;
        let sharding = &self.plan.sharding;
        let parts = sharding.map().parts(Axis::Elements);
        let first_holder = sharding.cut(Axis::KvHeads).copies(tensor).start;
        let of = |shape: &GroupShape| {
            let [trained, frozen] = StepPlan::owned(shape, *block, part, parts);
            let elsewhere = shape.copied.iter().filter(|copied| match copied.among {
                Copies::All => tensor != 0,
                Copies::KvHeads => tensor != first_holder,
            });
            let elsewhere = Ranges::of(elsewhere.map(|copied| copied.elements.clone()));
            let counted = Ranges::one(trained.clone()).difference(&elsewhere);
            Owned {
                random_from: trained.start,
                counted: if first_replica { counted } else { Ranges::default() },
                elements: Ranges::of([trained, frozen]),
            }
        };
        groups[tensor].iter().map(of).collect()
    }

    fn calls(&self, rank: usize) -> Vec<Call> {
        let sharding = &self.plan.sharding;
        let tensor = sharding.map().part(Axis::Heads, rank);
        let groups = self.groups(rank);
        let mut known: HashMap<_, Arc<Vec<Ranges>>> = HashMap::new();
        let mut calls = Vec::new();
        for edge in &self.edges {
            let transfer = edge.from.transfer(&edge.to).expect("it was derived by it");
            let copies = transfer.sum.as_ref().and_then(|(terms, _)| terms.copies);
            let among = match (edge.moved, copies) {
                (Moved::Totals, _) => Among::All,
                (Moved::Tokens { .. }, _) | (_, Some(Copies::All)) => Among::Tensor,
                (_, Some(Copies::KvHeads)) => Among::KvHolders,
                (Moved::Elements { .. }, None) => match edge.kind {
                    EdgeKind::AllReduce => Among::Replicas,
                    EdgeKind::AllGather | EdgeKind::ReduceScatter => Among::Parameters,
                },
            };
            let members = &groups[among as usize];
            let shape = match edge.moved {
                Moved::Elements { group, .. } => Some(&self.plan.shape.groups[tensor][group]),
                _ => None,
            };
            if among == Among::KvHolders {
                let copied = shape.is_some_and(|shape| {
                    shape.copied.iter().any(|copied| copied.among == Copies::KvHeads)
                });
                if members.len() < 2 || !copied {
                    continue;
                }
            }
            let parts = known.entry((among, edge.moved, edge.kind, copies));
            let parts = parts.or_insert_with(|| {
                let held = if edge.kind == EdgeKind::AllGather { &edge.from } else { &edge.to };
                let of = |&member: &usize| self.part(edge, held, member, copies);
                Arc::new(members.iter().map(of).collect())
            });
            calls.push(Call { edge: edge.number, among, parts: Arc::clone(parts) });
        }
        calls
    }

    /// What a member gives of a gather, or gets of a sum.
    fn part(&self, edge: &Edge, held: &Held, member: usize, copies: Option<Copies>) -> Ranges {
        let sharding = &self.plan.sharding;
        let map = sharding.map();
        match edge.moved {
            Moved::Totals => Ranges::one(0..1),
            Moved::Tokens { .. } => {
                let of_stream = held.axes.iter().any(|(axis, _)| *axis == Axis::Stream);
                let axis = if of_stream { Axis::Stream } else { Axis::Seq };
                Ranges::one(sharding.range(axis, member))
            }
            Moved::Elements { group, trained } => {
                let shape = &self.plan.shape.groups[map.part(Axis::Heads, member)][group];
                if let Some(copies) = copies {
                    return Ranges::one(0..shape.copied_among(copies));
                }
                let (part, parts) = (map.part(Axis::Elements, member), map.parts(Axis::Elements));
                let [own, frozen] = StepPlan::owned(shape, self.plan.shape.block, part, parts);
                if trained { Ranges::one(own) } else { Ranges::of([own, frozen]) }
            }
        }
    }
}
