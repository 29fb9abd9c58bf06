//! What the macros refuse, and the words they refuse it with.

#[test]
fn a_mod_that_cannot_be_says_why_and_what_to_write() {
    trybuild::TestCases::new().compile_fail("tests/refused/*.rs");
}
