from rest_framework.authentication import TokenAuthentication as TokenAuthentication
from rest_framework.pagination import CursorPagination as ByIdPagination  # noqa: F401
from rest_framework.permissions import IsAuthenticated as SignedInWithinScope  # noqa: F401
from rest_framework.views import exception_handler as explain_error  # noqa: F401
