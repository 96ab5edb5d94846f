"""Tandem's packages keep plain names, so they are listed one by one."""

from setuptools import setup

setup(
    name="tandem-rl",
    version="0.1.0",
    description="RL post-training with a Megatron-Core learner and SGLang rollouts, honest about their mismatch",
    python_requires="==3.11.*",
    packages=[
        "configs",
        "configs.schema",
        "launch",
        "parallel",
        "rollout",
        "rollout.rewards",
        "rollout.tasks",
        "trainer",
    ],
    package_data={
        "configs": ["recipes/*.yaml", "recipes/*/*.yaml", "debug/*.yaml"],
        "rollout": ["cpu_stand_ins/**/*.py"],
        "trainer": ["*.html"],
        "launch": ["*.sh", "slurm/*.sbatch", "requirements/*.txt"],
    },
    entry_points={"console_scripts": ["tandem = launch.cli:main"]},
)
