//! What a step that is not finite leaves, where the next one is queued before the host knows of it.

use super::*;

#[test]
fn a_step_that_is_not_finite_stops_what_is_queued_behind_it_until_it_is_read() {
    const ELEMS: usize = 1031;
    for mut both in Both::all(11) {
        let (precision, random) = (both.cuda.precision(), &mut both.random);
        let numbers = |random: &mut Random| -> Vec<f32> {
            (0..ELEMS).map(|_| random.normal() as f32).collect()
        };
        let (masters, values) = (numbers(random), numbers(random));
        let cuda = &mut both.cuda;
        let mut array = |name, dtype, elems| {
            let mut array = CudaArray::default();
            cuda.resize(name, &mut array, dtype, elems).unwrap();
            cuda.clear(&mut array).unwrap();
            array
        };
        let remainders = if precision.remainders { ELEMS } else { 0 };
        let mut weights = Weights {
            array: array("weights", precision.weights, ELEMS),
            remainders: array("remainders", DType::BF16, remainders),
        };
        let (dtype, elems) = precision.moments.array(ELEMS);
        let mut moments =
            Moments { mean: array("moment", dtype, elems), square: array("moment", dtype, elems) };
        let mut gradients = array("gradients", precision.gradients, ELEMS);
        cuda.fill_weights(&mut weights, 0, &masters).unwrap();
        cuda.fill(whole(&mut gradients), &values).unwrap();
        let treatment = Treatment { rate: 1.0, decay: 1.0 };
        let spans = cuda.spans(&[Span { origin: 0, place: 0..ELEMS, treatment }]).unwrap();
        let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let rule = Rule::AdamW(adamw);
        let mut step = |cuda: &mut Cuda, weights: &mut Weights<CudaArray>, nats: f64| {
            let step = OptimizerStep { rule, step: 1, rate: 1e-2, clip_norm: 0.2, seed: 3 };
            let mut totals = cuda.totals().unwrap();
            totals.memory.write([nats.to_ne_bytes(), 5u64.to_ne_bytes()].as_flattened()).unwrap();
            cuda.clip(&step, &gradients, false, None, &mut totals).unwrap();
            let at = (&gradients, 0);
            cuda.update(&step, &spans, weights, at, &mut moments, ELEMS, &mut totals).unwrap();
            totals
        };
        let held = |cuda: &mut Cuda, weights: &Weights<CudaArray>| {
            let mut found = vec![0.0; ELEMS];
            cuda.download_weights(weights, 0, &mut found).unwrap();
            found
        };
        let before = held(cuda, &weights);
        let wrong = step(cuda, &mut weights, f64::INFINITY);
        let behind = step(cuda, &mut weights, 4.0);
        let told = cuda.read(wrong).unwrap();
        assert!(told.nats.is_infinite() && told.grad_norm.is_finite());
        cuda.read(behind).unwrap();
        assert_eq!(held(cuda, &weights), before);
        let next = step(cuda, &mut weights, 4.0);
        cuda.read(next).unwrap();
        let before = held(cuda, &weights);
        assert_ne!(before, masters);
        // Where nobody reads of it, the next totals that are read say so.
        drop(step(cuda, &mut weights, f64::NAN));
        let behind = step(cuda, &mut weights, 4.0);
        let told = cuda.read(behind).unwrap_err().to_string();
        assert!(told.contains("a step before was not finite"), "{told}");
        assert_eq!(held(cuda, &weights), before);
        let next = step(cuda, &mut weights, 4.0);
        cuda.read(next).unwrap();
        assert_ne!(held(cuda, &weights), before);
    }
}
