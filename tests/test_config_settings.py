"""The table of settings: readers, defaults and variables."""

from dataclasses import fields

from ckptsync.config.settings import SECTIONS, SETTINGS
from ckptsync.config.values import (
    AlertsConfig,
    Config,
    HeadConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    RetentionConfig,
    StoreConfig,
    VerifyConfig,
    WorkerConfig,
)


def test_every_default_passes_its_own_reader() -> None:
    for setting in SETTINGS.values():
        setting.read(setting.default)


def test_the_table_and_the_frozen_values_have_the_same_keys() -> None:
    classes = {
        "store": StoreConfig,
        "limits": LimitsConfig,
        "worker": WorkerConfig,
        "head": HeadConfig,
        "verify": VerifyConfig,
        "retention": RetentionConfig,
        "alerts": AlertsConfig,
        "metrics": MetricsConfig,
        "log": LogConfig,
    }
    assert set(classes) == set(SECTIONS)
    keys = {f"{section}.{f.name}" for section, cls in classes.items() for f in fields(cls)}
    keys |= {f.name for f in fields(Config)} - {*classes, "overridden"}
    assert keys == set(SETTINGS)


def test_no_two_settings_share_a_variable_and_each_is_named_after_its_key() -> None:
    variables = {setting.environment: key for key, setting in SETTINGS.items() if setting.environment}
    assert len(variables) == sum(bool(setting.environment) for setting in SETTINGS.values())
    for variable, key in variables.items():
        assert variable in (f"CKPTSYNC_{key.upper().replace('.', '_')}", "CKPTSYNC_STORE", "CKPTSYNC_STORAGE_OPTIONS")
