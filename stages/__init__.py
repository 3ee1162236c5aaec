"""The stages that plan and train, and what they share; `ir` is what passes between them.

Stages, in order: `device` and `inputs` prepare; `trace`, `profile`, `partition`, `options`, `solve` and `codegen` plan;
`train` trains; `report` shows.

- `ir`: the tables that stages write and read.
- `workload`: what is trained: model, batches, optimizer.
- `structure`: nested Python objects and the tensors in them.
- `optimizers`: what is known of optimizers.
- `kernels`: which kernels real tensors take, and how they differ from fake ones.
- `rewrite`: other calls for the same step.
- `freezing`: which parts of a model train in a step, and what the others need not compute and keep.
- `sensitivity`: what codes for saved values do to gradients.
- `formulations`: programs and rules that find schedules; `solver` solves them.
- `simulate`: the referee of schedules and plans.
- `runtime`: runs plans.
- `settings`: params.yaml.
"""
