"""Servers that tests of every part share; each module starts its server when the first test asks for it."""

pytest_plugins = [
    "fixtures.certificates",
    "fixtures.playing",
    "fixtures.postgres",
    "fixtures.processes",
    "fixtures.s3",
    "fixtures.seaweed",
    "fixtures.served",
    "fixtures.fleet",
    "fixtures.training",
    "fixtures.valkey",
    "fixtures.rights",  # last: it imports from those before it
]
