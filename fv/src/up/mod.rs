mod dns;
mod hooks;
mod resolve;
mod routing;
mod undo;
