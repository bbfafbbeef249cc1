"""A plain Trainer: your loggers, your callbacks, your checkpoints."""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from my_ridge import DriftingRegressions

from obbo_lightning import OBBO, Box, ExactCheckpoints, FixedPoint, GradientDescent, NegativeEntropy
from obbo_lightning import OnlineBilevelModule, StreamDataModule

stream = DriftingRegressions(seed=0)
problem = stream.problem()
algorithm = OBBO(lr=0.5, geometry=NegativeEntropy(), domain=Box(1e-3, 2.0), hypergradient=FixedPoint(10),
                 inner=GradientDescent(steps=20, lr=0.1))  # fmt: skip
module = OnlineBilevelModule(problem, algorithm, stream.start(problem, seed=0))
data = StreamDataModule(stream, rounds=300)

best = ModelCheckpoint("best", monitor="validation/explained", mode="max", save_last=True)
stop = EarlyStopping("validation/explained", mode="max", patience=4)
trainer = L.Trainer(
    max_time={"minutes": 5},
    val_check_interval=25,  # rounds between validations
    log_every_n_steps=1,
    logger=CSVLogger("logs"),  # or WandbLogger
    callbacks=[best, stop, LearningRateMonitor()],
    plugins=[ExactCheckpoints()],
)
trainer.fit(module, data)
trainer.test(module, data)

again = OnlineBilevelModule.load_from_checkpoint(best.best_model_path)
print(f"{trainer.global_step} rounds; the best weight is {again.outer.item():.3f}")
trainer = L.Trainer(max_steps=trainer.global_step + 20, logger=False, callbacks=[], plugins=[ExactCheckpoints()])
trainer.fit(again, StreamDataModule(stream), ckpt_path=best.last_model_path)  # more of the same stream
