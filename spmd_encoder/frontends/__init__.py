"""Front ends: each translates one protocol to `EncoderService` and back, and nothing else."""
