//! Captured buffers of every element type, of any strides, and indices that count from the end.

use foveate_mods::vector::{Machine, Scores, TileProgram};
use foveate_mods::{
    AnyBuffer, Bounds, BufferData, Cover, DynExpr, ElementType, Expr, Head, Leaf, MaskMod, Point,
    Program, ScalarValue, SharedElements, Type, expr, text,
};
use foveate_tensor::random::Random;
use half::{bf16, f16};

const ROWS: usize = 9;
const COLUMNS: usize = 21;

/// Random memory of `len` elements. Bools are bytes of any value, floats not all finite.
fn memory(element: ElementType, len: usize, r: &mut Random) -> SharedElements {
    let mut below = |n: usize| r.below(n) as i64 - n as i64 / 2;
    macro_rules! of {
        ($n:expr, $as:expr) => {
            SharedElements::from_vec((0..len).map(|_| $as(below($n))).collect::<Vec<_>>())
        };
    }
    match element {
        ElementType::Bool => {
            let bytes: Vec<u8> = (0..len).map(|_| (below(6) + 3) as u8 & 4).collect();
            SharedElements::new(ElementType::Bool, std::sync::Arc::new(bytes))
        }
        ElementType::U8 => of!(256, |x| (x + 128) as u8),
        ElementType::I8 => of!(256, |x| x as i8),
        ElementType::I16 => of!(1 << 16, |x| x as i16),
        ElementType::I32 => of!(1 << 32, |x| x as i32),
        ElementType::I64 => of!(1 << 32, |x| x),
        ElementType::F16 => of!(1 << 17, |x| f16::from_f32(x as f32 * 0.37)),
        ElementType::BF16 => of!(1 << 17, |x| bf16::from_f32(x as f32 * 0.37)),
        ElementType::F32 => of!(1 << 17, |x| x as f32 * 0.37),
        ElementType::F64 => of!(1 << 17, |x| if x % 7 == 0 { 1e300 } else { x as f64 * 0.37 }),
    }
}

/// The value as f32, so that one root does for every type.
fn number(e: DynExpr) -> Program {
    Program::build(&[e.cast(Type::F32)])
}

/// Root 0 over a tile of `ROWS × COLUMNS` at the origin, by the vector machine.
fn tile(program: &Program, head: Head) -> Vec<f32> {
    let mut machine: Machine = TileProgram::compile(program).machine(ROWS, COLUMNS);
    machine.set_head(head);
    machine.set_tile(0..ROWS as i32, 0..COLUMNS as i32);
    machine.run(0..ROWS, 0..COLUMNS, Scores::default(), None);
    let stride = COLUMNS.next_multiple_of(16);
    let mut out = vec![f32::NAN; ROWS * stride];
    machine.store(0, &mut out, stride);
    assert_eq!(machine.out_of_range(), None);
    out.chunks(stride).flat_map(|row| row[..COLUMNS].to_vec()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn memory_of_every_type_and_stride_reads_as_its_copy_does() {
    let seed = 15;
    println!("seed {seed}");
    let mut r = Random::new(seed);
    let (q, kv, h) = (expr::q, expr::kv, expr::h);
    let head = Head { h: 3, q_len: ROWS as i32, kv_len: COLUMNS as i32, ..Head::default() };
    // As stored, transposed, with gaps, broadcast along either axis or both.
    let layouts: [[usize; 2]; 6] = [[30, 1], [1, 9], [45, 2], [0, 1], [3, 0], [0, 0]];
    for element in ElementType::ALL {
        for strides in layouts {
            let elements = memory(element, 600, &mut r);
            let shared =
                AnyBuffer::shared("x", &elements, &[ROWS, COLUMNS], &strides, 5, false).unwrap();
            let copy = AnyBuffer::new("x", &[ROWS, COLUMNS], shared.to_data(), false).unwrap();
            assert_eq!((shared.element(), shared.ty()), (element, element.into()));
            let indices: [[Expr<i32>; 2]; 4] =
                [[q(), kv()], [h(), kv()], [q(), h()], [(q() * kv()) % 9, (kv() - q()).abs()]];
            for index in indices {
                let index: Vec<DynExpr> = index.map(|i| i.dynamic().clone()).into();
                let of = |b: &AnyBuffer| DynExpr::load(b, index.clone()).unwrap();
                let [wanted, got] = [&copy, &shared].map(|b| tile(&number(of(b)), head));
                assert_eq!(bits(&got), bits(&wanted), "{element} with strides {strides:?}");
                let point = Point { h: 3, q: 7, kv: 11, ..Point::default() };
                let [wanted, got] =
                    [&copy, &shared].map(|b| Program::build(&[of(b)]).eval(&point).unwrap());
                assert_eq!(format!("{got:?}"), format!("{wanted:?}"));
            }
        }
    }
}

#[test]
fn bounds_of_memory_with_strides_are_those_of_its_copy() {
    let mut r = Random::new(7);
    let head = Head { h: 3, q_len: ROWS as i32, kv_len: COLUMNS as i32, ..Head::default() };
    let mut decided = 0;
    for element in ElementType::ALL {
        for strides in [[30, 1], [1, 9], [45, 2], [0, 1], [3, 0], [0, 0]] {
            let elements = memory(element, 600, &mut r);
            let shared =
                AnyBuffer::shared("x", &elements, &[ROWS, COLUMNS], &strides, 5, false).unwrap();
            let copy = AnyBuffer::new("x", &[ROWS, COLUMNS], shared.to_data(), false).unwrap();
            let bounds = [&copy, &shared].map(|b| {
                let index = vec![expr::q().dynamic().clone(), expr::kv().dynamic().clone()];
                let value = DynExpr::load(b, index).unwrap().cast(Type::F32);
                let mask = value.typed::<f32>().unwrap().lt(20.0);
                Bounds::new(&Program::build(&[mask.dynamic().clone()]))
            });
            for (q, kv) in
                [(0..9, 0..21), (2..4, 3..9), (1..2, 0..21), (0..9, 4..5), (8..9, 20..21)]
            {
                let [wanted, got] =
                    bounds.each_ref().map(|b| b.cover(&head, q.clone(), kv.clone()));
                assert_eq!(got, wanted, "{element} with strides {strides:?} over {q:?} x {kv:?}");
                decided += usize::from(got != Cover::Undecided);
            }
        }
    }
    assert!(decided > 50, "only {decided} rectangles were decided");
}

#[test]
fn negative_indices_count_from_the_end() {
    let mut r = Random::new(3);
    let data: Vec<f32> = (0..COLUMNS * 5).map(|_| r.normal() as f32).collect();
    let table = AnyBuffer::new("t", &[5, COLUMNS], BufferData::F32(data), false).unwrap();
    let (q, kv) = (expr::q, expr::kv);
    let head = Head { h: -2, q_len: ROWS as i32, kv_len: COLUMNS as i32, ..Head::default() };
    let wrapped = |i: Expr<i32>, len: usize| i.lt(0).select(&i + len as i32, &i);
    let indices: [[Expr<i32>; 2]; 6] = [
        [expr::h(), kv()],
        [expr::h() - 1, kv() - COLUMNS as i32],
        [kv() % 5 - 5, q() - kv()],
        [q() % 5 - 2, kv() - 4],
        [q() % 5 - 5, q() - ROWS as i32],
        [2.into(), (-1).into()],
    ];
    for index in indices {
        let dynamic = |index: [Expr<i32>; 2]| index.map(|i| i.dynamic().clone()).to_vec();
        let from_end = DynExpr::load_from_end(&table, dynamic(index.clone())).unwrap();
        let [i, j] = index;
        let by_hand = [wrapped(i, 5), wrapped(j, COLUMNS)];
        let by_hand = DynExpr::load(&table, dynamic(by_hand)).unwrap();
        let [wanted, got] = [by_hand, from_end].map(|e| tile(&number(e), head));
        assert_eq!(bits(&got), bits(&wanted));
    }
    let at = |e: Expr<i32>, kv: i32| {
        let e = DynExpr::load_from_end(&table, vec![0.into_expr(), e.dynamic().clone()]).unwrap();
        Program::build(&[e]).eval(&Point { kv, ..Point::default() }).map_err(|e| e.to_string())
    };
    assert!(at(kv() - 21, 0).is_ok() && at(kv(), 20).is_ok());
    let said = at(kv() - 22, 0).unwrap_err();
    assert!(said.starts_with("captured buffer `t` was read at index -22 of axis 1"), "{said}");
}

trait IntoExpr {
    fn into_expr(self) -> DynExpr;
}

impl IntoExpr for i32 {
    fn into_expr(self) -> DynExpr {
        DynExpr::constant(ScalarValue::I32(self))
    }
}

#[test]
fn a_read_from_the_end_has_a_text_that_says_so() {
    let bias = AnyBuffer::new("bias", &[2, 9], BufferData::F32(vec![0.5; 18]), true).unwrap();
    let names = text::Names::new().buffer(&bias);
    let score = text::parse_score("score + bias.from_end(h, q - kv)", &names).unwrap();
    assert_eq!(score.to_string(), "score + bias.from_end(h, q - kv)");
    let called = text::parse_score("score + from_end(bias, h, q - kv)", &names).unwrap();
    assert_eq!(score, called);
    let plain = text::parse_score("score + bias[h, q - kv]", &names).unwrap();
    assert_ne!(score, plain);
    assert_ne!(
        score.program().structural_hash(),
        plain.program().structural_hash(),
        "a kernel of one is none of the other"
    );
    let said = text::parse_score("score + from_end(q)", &names).unwrap_err().to_string();
    assert!(said.starts_with("`from_end` takes a captured buffer and its indices"), "{said}");
}

#[test]
fn document_ids_beyond_i32_are_an_error_not_another_document() {
    // Both have the same lower 32 bits.
    let ids = SharedElements::from_vec(vec![5i64, 5 + (1 << 32), 5, 7]);
    let doc = AnyBuffer::shared("doc", &ids, &[4], &[1], 0, false).unwrap();
    assert_eq!(doc.too_wide(), Some(5 + (1 << 32)));
    let at = |leaf| DynExpr::load(&doc, vec![DynExpr::leaf(leaf)]).unwrap().typed::<i32>().unwrap();
    let mask = MaskMod::new(at(Leaf::Q).eq(at(Leaf::Kv)).dynamic()).unwrap();
    let eval = |q, kv| mask.program().eval(&Point { q, kv, ..Point::default() });
    assert_eq!(eval(0, 2).unwrap(), [ScalarValue::Bool(true)]);
    let said = eval(0, 1).unwrap_err().to_string();
    assert!(said.starts_with("captured buffer `doc` holds 4294967301, and masks"), "{said}");
    // No rectangle is decided, so whoever evaluates the mask meets the id.
    let bounds = Bounds::new(mask.program());
    let head = Head { q_len: 4, kv_len: 4, ..Head::default() };
    assert_eq!(bounds.cover(&head, 0..1, 3..4), Cover::Undecided);
    let mut machine = TileProgram::compile(mask.program()).machine(4, 4);
    machine.set_head(head);
    machine.set_tile(0..4, 0..4);
    machine.mask_bits(None, &mut Default::default());
    assert_eq!(machine.out_of_range().unwrap().to_string(), said);
}

#[test]
fn memory_that_a_buffer_does_not_fit_is_refused() {
    let elements = SharedElements::from_vec(vec![0f32; 12]);
    let said = |shape: &[usize], strides: &[usize], offset| {
        AnyBuffer::shared("x", &elements, shape, strides, offset, false).unwrap_err().to_string()
    };
    assert!(AnyBuffer::shared("x", &elements, &[3, 4], &[4, 1], 0, true).is_ok());
    assert!(AnyBuffer::shared("x", &elements, &[0, 4], &[4, 1], 99, false).is_ok(), "no element");
    assert!(said(&[3, 4], &[4, 1], 1).ends_with("reaches past the 12 elements of the memory"));
    assert!(said(&[2, usize::MAX / 2], &[1, 3], 0).contains("reaches past the 12 elements"));
    assert!(said(&[3, 4], &[4], 0).ends_with("has another rank than strides [4]"));
    let bytes: std::sync::Arc<Vec<u8>> = std::sync::Arc::new(vec![0; 33]);
    let odd = Odd(bytes);
    let odd = SharedElements::new(ElementType::I64, std::sync::Arc::new(odd));
    let said = AnyBuffer::shared("x", &odd, &[2], &[1], 0, false).unwrap_err().to_string();
    assert_eq!(said, "buffer `x`: the memory begins at no multiple of the 8 bytes of i64");
    let ints = SharedElements::from_vec(vec![0i64; 2]);
    let said = AnyBuffer::shared("x", &ints, &[2], &[1], 0, true).unwrap_err().to_string();
    assert!(said.ends_with("only f32, f16 and bf16 buffers have gradients"), "{said}");
    let one = SharedElements::from_vec(vec![2.5f64]);
    let one = AnyBuffer::shared("x", &one, &[], &[], 0, false).unwrap();
    assert_eq!((one.shape(), one.to_data()), (&[1][..], BufferData::F32(vec![2.5])));
}

/// Bytes that begin one past a multiple of eight.
struct Odd(std::sync::Arc<Vec<u8>>);

impl AsRef<[u8]> for Odd {
    fn as_ref(&self) -> &[u8] {
        let past = self.0.as_ptr().align_offset(8) + 1;
        &self.0[past..past + 16]
    }
}
