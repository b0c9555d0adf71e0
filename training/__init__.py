"""Fine-tuning and distillation of converted models."""

import conversion  # noqa: F401  its wait policy, before torch is imported
