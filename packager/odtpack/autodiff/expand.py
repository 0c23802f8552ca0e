def expand(model, sources):
    return model
