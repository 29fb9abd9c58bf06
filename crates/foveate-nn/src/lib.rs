//! Fused transformer blocks with hand-written forward and backward
