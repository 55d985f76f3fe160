mod bulk;
mod memory;
mod ping;
mod place;
