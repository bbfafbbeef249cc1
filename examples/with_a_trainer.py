"""A plain Trainer: your loggers, your callbacks, your checkpoints."""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from my_ridge import DriftingRegressions

import obbo_lightning as obbo

stream = DriftingRegressions(seed=0)
problem = stream.problem()
algorithm = obbo.OBBO(lr=0.5, window=10, geometry=obbo.NegativeEntropy(), domain=obbo.Box(1e-3, 2.0))
module = obbo.OnlineBilevelModule(problem, algorithm, stream.start(problem, seed=0))
data = obbo.StreamDataModule(stream, rounds=300)

best = ModelCheckpoint("best", monitor="validation/explained", mode="max", save_last=True)
stop = EarlyStopping("validation/explained", mode="max", patience=4)
trainer = L.Trainer(
    max_time={"minutes": 5},
    val_check_interval=25,  # rounds between validations
    log_every_n_steps=1,
    logger=CSVLogger("logs"),  # or WandbLogger
    callbacks=[best, stop, LearningRateMonitor()],
    plugins=[obbo.ExactCheckpoints()],
)
trainer.fit(module, data)
trainer.test(module, data)

again = obbo.OnlineBilevelModule.load_from_checkpoint(best.best_model_path)
print(f"{trainer.global_step} rounds; the best weight is {again.outer.item():.3f}")
more = L.Trainer(max_steps=trainer.global_step + 20, logger=False, plugins=[obbo.ExactCheckpoints()])
more.fit(again, obbo.StreamDataModule(stream), ckpt_path=best.last_model_path)  # more of the same stream
