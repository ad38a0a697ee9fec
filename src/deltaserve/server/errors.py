"""Errors in the API's shape: every answer outside 2xx has a message, a type, a param and a code. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deltaserve.engine.client import OverloadedError
from deltaserve.engine.stream import EngineStoppedError

RETRY_AFTER_SECONDS = 1
CLIENT_GONE = 499
"""The status of an answer that nobody waits for."""


class ApiError(Exception):
    """Becomes an answer. `param` is the field of the request that is at fault, where one is."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case 503:
                return "service_unavailable_error"
            case status if status < 500:
                return "invalid_request_error"
        return "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def timed_out(message: str) -> ApiError:
    """For a request that does not come to its end; what is left of it is nobody's."""
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


def shutting_down() -> ApiError:
    return unavailable("the server is shutting down and takes no new work", "shutting_down")


def api_error(failure: BaseException) -> ApiError | None:
    """The answer to what the engine's end raises; None for what is no affair of the user's."""
    match failure:
        case ApiError():
            return failure
        case OverloadedError():
            return unavailable(f"{failure}; try again later", "overloaded")
        case EngineStoppedError():
            return unavailable(str(failure), "engine_stopped")
        case ValueError():
            return bad_request(str(failure))
    return None


def http_error(status: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """For what the router refuses."""
    match status:
        case 404:
            return ApiError(404, f"there is no {path} here", code="not_found")
        case 405:
            allowed = (headers or {}).get("Allow", "")
            message = f"{path} does not take {method}" + (f", only {allowed}" if allowed else "")
            return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(status, HTTPStatus(status).phrase.lower(), headers=headers)


def install(app: Starlette) -> None:
    """Gives every error of the app its shape. What nobody foresaw is a 500, and its trace goes to the log."""

    async def on_http(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, HTTPException), "registered for HTTPException only"
        return http_error(failure.status_code, request.method, request.url.path, failure.headers).response()

    async def on_api(request: Request, failure: Exception) -> Response:
        error = api_error(failure)
        assert error is not None, "registered for API errors only"
        return error.response()

    async def on_gone(request: Request, failure: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def on_unforeseen(request: Request, failure: Exception) -> Response:
        return ApiError(500, "an error inside the server; its log has more", code="internal_error").response()

    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, OverloadedError, EngineStoppedError):
        app.add_exception_handler(kind, on_api)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(Exception, on_unforeseen)
