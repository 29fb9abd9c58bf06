//! Data, packing, checkpoints, optimiser and recipes of the Foveate trainer
