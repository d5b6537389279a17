from channels.generic.websocket import AsyncWebsocketConsumer


class AgentStream(AsyncWebsocketConsumer):
    pass
