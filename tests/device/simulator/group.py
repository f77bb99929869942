def meet_in(folder): pass
def leave(): pass
