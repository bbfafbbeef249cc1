"""Streams: where tasks come from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "stream": ["Metric", "Stream", "TaskSequence", "Tasks"],
        "few_shot.stream": ["FewShotStream"],
        "few_shot.synthetic": ["SyntheticStream"],
        "few_shot.fc100": ["FC100Stream"],
        "few_shot.stored": ["ExampleStream", "ImageFolderStream"],
        "few_shot.learn2learn": ["LearnToLearnStream", "LearnToLearnTasks"],
        "labelled.sources": ["SourcesStream"],
        "labelled.imbalance": ["ImbalanceStream"],
        "labelled.regularization": ["RegularizationStream"],
        "tabular": ["ForgettingStream"],
        "market": ["MarketStream"],
        "arriving": ["FollowStream"],
        "quadratic": ["QuadraticStream", "QuadraticTasks"],
    },
)
