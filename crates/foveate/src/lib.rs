//! Programmable attention for training transformers
