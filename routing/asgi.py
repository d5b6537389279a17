class Gateway:
    def serves(self, path: str) -> bool:
        return path.startswith("/v1/")

    async def __call__(self, scope, receive, send):
        raise NotImplementedError

    async def lifespan(self, scope, receive, send):
        raise NotImplementedError
