"""A plain Trainer: your loggers, your callbacks, your checkpoints."""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from my_ridge import DriftingRegressions

from obbo_lightning import OBBO, ExactCheckpoints, OnlineBilevelModule, StreamDataModule
from obbo_lightning.domains import Box
from obbo_lightning.geometry import NegativeEntropy

data = StreamDataModule(DriftingRegressions(seed=0), rounds=300)
algorithm = OBBO(lr=0.5, window=10, geometry=NegativeEntropy(), domain=Box(1e-3, 2.0))
module = OnlineBilevelModule.from_data(data, algorithm)

best = ModelCheckpoint("best", monitor="validation/explained", mode="max", save_last=True)
trainer = L.Trainer(
    max_time={"minutes": 5},
    val_check_interval=25,  # rounds between validations
    log_every_n_steps=1,
    logger=CSVLogger("logs"),  # or WandbLogger
    callbacks=[best, EarlyStopping("validation/explained", mode="max", patience=4), LearningRateMonitor()],
    plugins=[ExactCheckpoints()],
)
trainer.fit(module, data)
trainer.test(module, data)

again = OnlineBilevelModule.load_from_checkpoint(best.best_model_path, trust=True)
print(f"{trainer.global_step} rounds; the best weight is {again.outer.item():.3f}")
more = L.Trainer(max_steps=trainer.global_step + 20, logger=False, plugins=[ExactCheckpoints()])
more.fit(again, StreamDataModule(data.stream), ckpt_path=best.last_model_path)  # 20 more rounds of the same stream
