//! One corpus of attention cases that every backend runs
