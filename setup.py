"""Tandem's packages keep plain names, so all are named."""

from setuptools import find_packages, setup

setup(
    name="tandem-rl",
    version="0.1.0",
    description="RL post-training with a Megatron-Core learner and SGLang rollouts, honest about their mismatch",
    python_requires=">=3.11,<3.13",
    packages=find_packages(
        include=[
            f"{name}*"
            for name in ("configs", "launch", "numerics", "parallel", "rollout", "tracing", "trainer")
        ]
    ),
    package_data={
        "configs": ["recipes/*.yaml", "recipes/*/*.yaml", "debug/*.yaml", "hardware/*.yaml"],
        "rollout": ["cpu_stand_ins/**/*.py", "sglang_plugin/**/*"],
        "trainer.report": ["*.html"],
        "launch": ["*.sh", "requirements/*.txt", "requirements/*.lock", "containers/*"],
        "launch.slurm": ["*.sbatch"],
    },
    exclude_package_data={"rollout": ["**/__pycache__/*"]},
    entry_points={"console_scripts": ["tandem = launch.cli:main"]},
)
