"""vLLM's real scheduler and VUA's real connector around a fake model that knows every K/V value.

`truth` is the model, `worker` drives the connector's worker half as vLLM's model runner does,
`engine` puts both halves round vLLM's scheduler, `case` draws a random scenario and plays it,
`mutants` are connectors with one bug each. Nothing here computes attention or needs weights, so
hundreds of requests take seconds.
"""
