//! The barriers of the Hopper kernels by their numbers: the structs that name mbarriers, compiled for the host, make each
//! number once and leave out none, so that no two uses share one; named barriers are named.

#[path = "../src/compile/on_host.rs"]
mod on_host;

const FORWARD: &str = include_str!("../kernels/hopper/forward_device.cuh");
const STEPS: &str = include_str!("../kernels/hopper/backward_steps.cuh");
const BACKWARD: &str = include_str!("../kernels/hopper/backward_device.cuh");
const WIDE: &str = include_str!("../kernels/hopper/backward_wide.cu");
const DQ: &str = include_str!("../kernels/hopper/backward_dq.cu");

/// What the structs take of the other kernel files: an mbarrier notes how often it is made.
const AROUND: &str = r#"
#include <cstdio>
#include <map>
typedef unsigned int u32;
#define __device__
constexpr int AT_BARRIERS = 512;
static std::map<u32, int> made;
struct CopyBarrier {
    u32 at;
    void init(int arrivals) const { made[at] += arrivals > 0 ? 1 : 100; }
};
static void fence_barrier_init() {}
struct Keys { static constexpr int ARRIVALS = 1; };
struct Values { static constexpr int ARRIVALS = 1; };
constexpr int COPIED_K = 0, COPIED_Q = 0, ITEMS = 3, STEPS = 8;
"#;

const MAIN: &str = r#"
int main() {
    Barriers{1024}.init();
    u32 next = 1024 + AT_BARRIERS;
    for (auto [at, times] : made) {
        if (at != next || times != 1) std::printf("mbarrier %u is made %d times behind %u\n", (at - 1024 - AT_BARRIERS) / 8, times, next);
        next = at + 8;
    }
    std::printf("%zu\n", made.size());
}
"#;

fn part(file: &'static str, from: &str) -> &'static str {
    let at = file.find(from).unwrap_or_else(|| panic!("no {from:?}"));
    let end = file[at..].find("\n};\n").expect("a struct ends");
    &file[at..at + end + 4]
}

/// Mbarriers that `init` makes with these constants; `None` without a compiler.
fn made(constants: &str, parts: &[&str]) -> Option<usize> {
    let code = [&[AROUND, constants][..], parts, &[MAIN]].concat().join("\n");
    let said = on_host::text(&code)?;
    Some(said.trim().parse().unwrap_or_else(|_| panic!("{constants}: {said}")))
}

#[test]
fn every_mbarrier_has_a_number_of_its_own_and_is_made_once() {
    let barriers = |file| part(file, "struct Barriers");
    let steps = part(STEPS, "struct StepBarriers");
    for (stages, consumers) in [(2, 1), (2, 2), (3, 3), (4, 2)] {
        let constants = |more: &str| {
            format!("constexpr int FV_STAGES = {stages}, CONSUMERS = {consumers}{more};\n")
        };
        for q_stages in [1, 2] {
            let constants = constants(&format!(", Q_STAGES = {q_stages}"));
            let count = 4 * stages + 2 * q_stages * consumers + 2 * 3 + 1;
            let Some(made) = made(&constants, &[barriers(FORWARD)]) else { return };
            assert_eq!(made, count, "forward, {constants}");
        }
        for ordered in [0, 1] {
            let constants = constants(&format!(", FV_ORDERED_DQ = {ordered}"));
            let made = made(&constants, &[steps, barriers(BACKWARD)]);
            assert_eq!(made, Some(16 + 6 + 3 * stages + 2 * ordered), "backward, {constants}");
        }
        let wide = made(&constants(""), &[steps, barriers(WIDE)]);
        assert_eq!(wide, Some(16 + 7 + 4 * stages), "wide");
        let dq = made(&constants(", V_STAGES = 2"), &[steps, barriers(DQ)]);
        assert_eq!(dq, Some(16 + 2 + 2 * stages + 2 * 2), "dq");
    }
}

#[test]
fn an_mbarrier_that_has_a_name_is_made_by_it() {
    for file in [FORWARD, STEPS, BACKWARD, WIDE, DQ] {
        let from = if file == STEPS { "struct StepBarriers" } else { "struct Barriers" };
        let text = part(file, from);
        let names = text.split("CopyBarrier ").skip(1).filter_map(|rest| {
            let name = rest.split('(').next()?;
            rest.lines().next()?.contains("return at(").then_some(name)
        });
        let names: Vec<&str> = names.collect();
        assert!(names.len() >= 2, "{names:?}");
        for name in names {
            let made = text.lines().any(|line| {
                line.trim().starts_with(&format!("{name}(")) && line.contains(").init(")
            }) || text.contains(&format!(") {name}(s).init("));
            assert!(
                made,
                "{name} is not made by its name in {from} of {}",
                file.lines().next().unwrap_or("")
            );
        }
    }
}

#[test]
fn named_barriers_are_constants_of_one_list() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut uses = 0;
    for entry in
        ["hopper", "portable", "."].iter().flat_map(|of| folder.join(of).read_dir().unwrap())
    {
        let path = entry.unwrap().path();
        if path.is_dir() {
            continue;
        }
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            for call in ["named_sync(", "named_arrive("] {
                for rest in
                    line.split(call).skip(1).filter(|_| !line.starts_with("__device__ void named_"))
                {
                    assert!(rest.starts_with("Named::"), "{}: {line}", path.display());
                    uses += 1;
                }
            }
        }
    }
    assert!(uses >= 5, "{uses} uses");
}
