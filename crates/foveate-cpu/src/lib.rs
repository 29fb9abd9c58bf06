//! Fused attention on the CPU, forward and backward
